"""Shows the progress of a training: a bar with rate and time left on a terminal, plain lines elsewhere."""

from cacheprobe.core.terminal import Progress


class TrainingProgress(Progress):
    """Shows the progress of a training inside a `with` block: a bar on a terminal, plain lines elsewhere. The caller
    calls the TrainingProgress with (number of steps done, short text) after a step."""

    def __init__(self, total_steps: int, done: int, enabled: bool) -> None:
        super().__init__(total_steps, "training", "steps", done=done, enabled=enabled, says_end=True)

    def __call__(self, done: int, words: str) -> None:
        self.set_done(done, words)
