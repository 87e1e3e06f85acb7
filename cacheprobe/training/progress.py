"""Shows the progress of a training: a bar with rate and time left on a terminal, plain lines elsewhere."""

from cacheprobe.core.progress import Progress


class TrainingProgress(Progress):
    """Shows the progress of training steps while a `with` block runs: a bar on a terminal, plain lines elsewhere. The
    caller calls the TrainingProgress with (number of steps done, short text) after every step.

    `say` prints a line that stays above the bar.
    """

    def __init__(self, total_steps: int, done: int, enabled: bool) -> None:
        super().__init__(total_steps, "training", "steps", done=done, enabled=enabled, says_end=True)

    def __call__(self, done: int, words: str) -> None:
        self.set_done(done, words)
