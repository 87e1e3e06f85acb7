"""Shows a training's progress: a bar with rate and time left on a terminal, plain lines elsewhere."""

from cacheprobe.core.progress import Progress


class TrainingProgress(Progress):
    """A progress bar for steps. Call the object after every step with a short text; `say` prints a line that stays."""

    def __init__(self, total_steps: int, done: int, enabled: bool) -> None:
        super().__init__(total_steps, "training", "steps", done=done, enabled=enabled, says_end=True)

    def __call__(self, done: int, words: str) -> None:
        self.at(done, words)
