"""Lists the presets: named settings of Thinking States trainings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace

from cacheprobe.core.values import require_one_of
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.tasks import FORMATS, CoinFlip, Permutations, Task, Variables
from cacheprobe.training.loop import LoopSettings
from cacheprobe.training.thinking.losses import ARMS


@dataclass(frozen=True)
class Preset:
    """Holds the settings of a Thinking States training: task, form of the thoughts, model and training loop."""

    task: Callable[[int], Task]
    """Function from a number of operations to the task with this number."""
    operations: tuple[int, ...] = tuple(range(1, 11))
    """Numbers of operations in the training questions; all are equally likely."""
    variants: tuple[Mapping[str, float], ...] = ({},)
    """Settings of the task. The training texts are made in equal numbers from each."""
    form: str = "restate"
    """One of FORMATS: the rule for the thought after a chunk."""
    chain: str = "operations"
    """One of CHAINS: what the chain of thought writes for each operation."""
    position_jump: int = 6_000
    """At two chunk boundaries of a training text, the position ids skip fewer ids than this number each time: see
    `losses.skipping_positions`. 0: no id is skipped."""
    attention_crowding: bool = False
    """Whether training adds an attention bias in place of the skipped tokens; see `losses.attention_crowding`."""
    pool: int = 12_000
    """Number of examples from which batches are drawn."""
    model: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    """Fields of ThinkingConfig that differ from the defaults."""
    loop: LoopSettings = field(default_factory=LoopSettings)
    arms: Mapping[str, Mapping[str, int | float]] = field(default_factory=dict)
    """Other values for single arms: arm (one of ARMS) -> fields of LoopSettings, and `position_jump`."""

    def tasks(self) -> list[Task]:
        """Returns a list of tasks: for each of `variants`, the task with the largest trained number of operations."""
        return [changed(self.task(self.operations[-1]), settings) for settings in self.variants]

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of the words and punctuation marks in the texts of all variants of the task, for
        `word_tokenizer`."""
        return tuple(sorted({word for task in self.tasks() for word in task.vocabulary()}))

    def loop_settings(self, arm: str, seed: int) -> LoopSettings:
        """Returns the LoopSettings (steps, batch, learning rate, ...) for training `arm`, one of ARMS, from `seed`."""
        own = {name: value for name, value in self.arms.get(arm, {}).items() if name != "position_jump"}
        return replace(self.loop, seed=seed, **own)

    def max_position_jump(self, arm: str) -> int:
        """Returns a bound for the training of `arm`, one of ARMS: at two places of a text, the position ids skip fewer
        ids than this number each time. 0: no id is skipped."""
        return int(self.arms.get(arm, {}).get("position_jump", self.position_jump))

    def chain_form(self, arm: str) -> str | None:
        """Returns the form (one of CHAINS) of the chain of thought if `arm` is "chain_of_thought"; None for another
        arm."""
        return self.chain if arm == "chain_of_thought" else None

    def config(self, arm: str, d_vocab: int) -> ThinkingConfig:
        """Returns the ThinkingConfig (shape of the model) of `arm`, one of ARMS, for a vocabulary of `d_vocab` tokens.

        Raises: ValueError for an unknown arm.
        """
        require_one_of("arm", arm, ARMS)
        thinks = arm in ("thinking", "no_feedback")
        return replace(ThinkingConfig(d_vocab, thinks=thinks, feeds_back=arm != "no_feedback"), **self.model)


def changed(task: Task, settings: Mapping[str, object]) -> Task:
    """Returns a copy of `task` in which the fields named in `settings` have the values of `settings`."""
    assert is_dataclass(task) and not isinstance(task, type)
    return replace(task, **settings)


def _coin(operations: int) -> Task:
    """Returns the coin-flip task with `operations` people, as a CoinFlip."""
    return CoinFlip(people=operations, distinct=operations <= 20)


_FLIPS = tuple({"flip_probability": p} for p in (0.1, 0.3, 0.5, 0.7, 0.9))
_LOOP = LoopSettings(steps=1000, batch=32, weight_decay=0.1)
_ARMS = {  # without jumps, these three arms need far fewer steps to reach 99 % on texts like the trained ones
    "no_feedback": dict(steps=1400, position_jump=0),
    "plain": dict(steps=1600, position_jump=0),
    "chain_of_thought": dict(steps=1600, position_jump=0),
}
_JUMPING_ARMS = {arm: dict(steps=3000) for arm in ("no_feedback", "plain", "chain_of_thought")}
_JITTERED = ({"jitter": 0}, {"jitter": 3})
_S3 = Preset(  # a window: without it, attention spreads over all swaps, and training has four at most
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
    # with as many steps as thoughts take, one of two seeds did not learn the chain of thought
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
        # as tiny, but the positions of the other arms jump too, so these arms need more steps
        "position-jumps": Preset(_coin, variants=_FLIPS, loop=_LOOP, arms=_JUMPING_ARMS),
        # as tiny, for a thousand operations: a bias acts as if the skipped positions held tokens
        "attention-crowding": Preset(_coin, variants=_FLIPS, attention_crowding=True, loop=_LOOP),
        # as tiny, without jumps: no position beyond the length of the trained texts occurs in training
        "no-position-jumps": Preset(_coin, variants=_FLIPS, position_jump=0, loop=_LOOP),
        # as in the paper: thoughts only after chunks in which an operation ends
        "paper": Preset(_coin, variants=_FLIPS, form="state", position_jump=0, loop=_LOOP),
        # as tiny, but the chain of thought writes only states, as the paper's thoughts do
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
    # attention-crowding: as for coin-flip; equal to tiny for the other arms, because their positions do not jump
    "variables": {
        "tiny": _VARIABLES,
        "attention-crowding": replace(_VARIABLES, attention_crowding=True),
    },
}


def preset_of(task: str, name: str, form: str | None = None) -> Preset:
    """Returns the Preset called `name` for a task. form: replaces the preset's form of the thoughts, if given.

    Raises: ValueError for an unknown task, preset or form, naming the known ones.
    """
    require_one_of("task with presets (s3 and s5 are permutations)", task, PRESETS)
    require_one_of(f"preset of {task}", name, PRESETS[task])
    if form is not None:
        require_one_of("form of thoughts", form, FORMATS)
    return replace(PRESETS[task][name], form=form or PRESETS[task][name].form)
