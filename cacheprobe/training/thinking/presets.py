"""All settings of every arm that is trained here. The arms of a preset share data and backbone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace

from cacheprobe.core.values import hint
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.tasks import FORMATS, CoinFlip, Permutations, Task, Variables
from cacheprobe.training.loop import LoopSettings
from cacheprobe.training.thinking.losses import ARMS


@dataclass(frozen=True)
class Preset:
    """A task, the form of its thoughts, and the model and training loop that learn it."""

    task: Callable[[int], Task]
    """Returns the task with this many operations."""
    operations: tuple[int, ...] = tuple(range(1, 11))
    """Numbers of operations in training, each equally often."""
    variants: tuple[Mapping[str, float], ...] = ({},)
    """Settings of the task, each trained equally often, so that the model cannot learn a regularity of one variant."""
    form: str = "restate"
    """One of FORMATS: thoughts in every chunk ("restate"), only after operations ("state"), or only on changes
    ("delta")."""
    chain: str = "operations"
    """One of CHAINS: what the chain of thought writes for each operation."""
    position_jump: int = 6_000
    """In training, positions jump by up to this many between chunks; see `skipping_positions`. 0: no jumps."""
    attention_crowding: bool = False
    """Whether training adds the attention bias that stands for the skipped tokens; see `attention_crowding`."""
    pool: int = 12_000
    """Number of examples from which batches are drawn."""
    model: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    """Fields of ThinkingConfig that differ from the defaults."""
    loop: LoopSettings = field(default_factory=LoopSettings)
    arms: Mapping[str, Mapping[str, int | float]] = field(default_factory=dict)
    """By arm: fields of LoopSettings, and `position_jump`, with which the arm performs best in distribution."""

    def tasks(self) -> list[Task]:
        """Returns the task with the most operations, in each of its variants."""
        return [changed(self.task(self.operations[-1]), settings) for settings in self.variants]

    def vocabulary(self) -> tuple[str, ...]:
        """Returns all words of all variants, sorted."""
        return tuple(sorted({word for task in self.tasks() for word in task.vocabulary()}))

    def loop_settings(self, arm: str, seed: int) -> LoopSettings:
        """Returns the LoopSettings (steps, batch, learning rate) of one training arm, with this seed."""
        own = {name: value for name, value in self.arms.get(arm, {}).items() if name != "position_jump"}
        return replace(self.loop, seed=seed, **own)

    def max_position_jump(self, arm: str) -> int:
        """Returns the maximum position jump in an arm's training."""
        return int(self.arms.get(arm, {}).get("position_jump", self.position_jump))

    def chain_form(self, arm: str) -> str | None:
        """Returns what an arm writes before the answer, one of CHAINS; None if the arm writes only the answer."""
        return self.chain if arm == "chain_of_thought" else None

    def config(self, arm: str, d_vocab: int) -> ThinkingConfig:
        """Returns the model config of an arm; the backbone is the same for all arms."""
        if arm not in ARMS:
            raise ModelError(f"unknown arm {arm!r}; choose one of {', '.join(ARMS)}")
        thinks = arm in ("thinking", "no_feedback")
        return replace(ThinkingConfig(d_vocab, thinks=thinks, feeds_back=arm != "no_feedback"), **self.model)


def changed(task: Task, settings: Mapping[str, object]) -> Task:
    """Returns the task with other settings. Every task is a dataclass of its settings."""
    assert is_dataclass(task) and not isinstance(task, type)
    return replace(task, **settings)


def _coin(operations: int) -> Task:
    return CoinFlip(people=operations, distinct=operations <= 20)


_FLIPS = tuple({"flip_probability": p} for p in (0.1, 0.3, 0.5, 0.7, 0.9))
_LOOP = LoopSettings(steps=1000, batch=32, weight_decay=0.1)
_ARMS = {  # without jumps these three reach 99 % in distribution in a fraction of the steps
    "no_feedback": dict(steps=1400, position_jump=0),
    "plain": dict(steps=1600, position_jump=0),
    "chain_of_thought": dict(steps=1600, position_jump=0),
}
_JUMPING_ARMS = {arm: dict(steps=3000) for arm in ("no_feedback", "plain", "chain_of_thought")}
_JITTERED = ({"jitter": 0}, {"jitter": 3})
_S3 = Preset(  # a window, since attention to all earlier swaps, of which four are trained, is diluted by the later ones
    lambda steps: Permutations(steps=steps, elements=3),
    operations=(1, 2, 3, 4),
    variants=_JITTERED,
    position_jump=0,
    model=dict(chunk=5, attention_window=10),
    loop=replace(_LOOP, steps=700),
)

_S3_FULL = replace(_S3, model=dict(chunk=5), position_jump=6_000, loop=_LOOP)

_VARIABLES = Preset(
    lambda updates: Variables(updates=updates),
    variants=_JITTERED,
    model=dict(chunk=6, max_thought=16),
    loop=replace(_LOOP, steps=2400),
    # one seed of two did not learn a chain in as many steps as thoughts take
    arms={
        "no_feedback": dict(position_jump=0),
        "plain": dict(position_jump=0),
        "chain_of_thought": dict(steps=3600, position_jump=0),
    },
)

PRESETS: dict[str, dict[str, Preset]] = {
    "coin-flip": {
        "tiny": Preset(_coin, variants=_FLIPS, loop=_LOOP, arms=_ARMS),
        "small": Preset(_coin, variants=_FLIPS, model=dict(d_model=32, n_layers=3, l_out=2, d_mlp=64), loop=_LOOP),
        # the tiny one; the other arms' positions jump as its own do, for which they need more steps
        "position-jumps": Preset(_coin, variants=_FLIPS, loop=_LOOP, arms=_JUMPING_ARMS),
        # for a thousand operations: the tiny one, and in training attention meets as many tokens as their positions say
        "attention-crowding": Preset(_coin, variants=_FLIPS, attention_crowding=True, loop=_LOOP),
        # as the arms that the tiny one is compared with: no position beyond those of the trained texts is ever seen
        "no-position-jumps": Preset(_coin, variants=_FLIPS, position_jump=0, loop=_LOOP),
        # as the paper has it: thoughts where an operation ends alone, too
        "paper": Preset(_coin, variants=_FLIPS, form="state", position_jump=0, loop=_LOOP),
        # the tiny one, but that a chain of thought writes states alone, which is what the paper's thoughts are
        "bare-chain": Preset(_coin, variants=_FLIPS, chain="states", loop=_LOOP, arms=_ARMS),
    },
    "s3": {
        "tiny": _S3,
        "full": _S3_FULL,
        "attention-crowding": replace(_S3_FULL, attention_crowding=True, loop=replace(_LOOP, steps=2000)),
    },
    "s5": {
        "tiny": replace(_S3, task=lambda steps: Permutations(steps=steps, elements=5), loop=replace(_LOOP, steps=1200)),
    },
    # attention-crowding: as the coin's; of the other arms, whose positions do not jump, it is the tiny one
    "variables": {
        "tiny": _VARIABLES,
        "attention-crowding": replace(_VARIABLES, attention_crowding=True),
    },
}


def preset_of(task: str, name: str, form: str | None = None) -> Preset:
    """Returns a preset by task and name. form: how thoughts are written, if not as in the preset.

    Raises: ModelError for an unknown task, preset or form, naming the known ones.
    """
    if task not in PRESETS:
        raise ModelError(f"no presets for task {task!r}; there are some for {', '.join(PRESETS)}")
    if name not in PRESETS[task]:
        raise ModelError(
            f"no preset {name!r} for {task}; choose one of {', '.join(PRESETS[task])}{hint(name, PRESETS[task])}"
        )
    if form is not None and form not in FORMATS:
        raise ModelError(f"unknown form {form!r} of thoughts; choose one of {', '.join(FORMATS)}")
    return replace(PRESETS[task][name], form=form or PRESETS[task][name].form)
