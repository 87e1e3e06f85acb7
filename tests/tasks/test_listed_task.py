"""A task that lists its questions."""

import pytest

import cacheprobe as cp
from cacheprobe.tasks import word_tokenizer


class Lamp(cp.tasks.ListedTask):
    prompts = ("The lamp is off. Bob presses. The lamp is", "The lamp is on. Ann sleeps. The lamp is", "Now it is")
    answers = (" on", " on", " off")


class LampWithStates(Lamp):
    states = (
        (None, None, None, "off", "off", "on", "on", "on", "on"),
        (None, None, None, "on", "on", "on", "on", "on", "on"),
        (None, "off", "off"),
    )


def test_prompts_and_answers_are_enough() -> None:
    first = Lamp().example(0)
    assert first.prompt == Lamp.prompts[0] and first.answer == " on" and first.answers == (" off", " on")
    assert first.states == first.events == () and first.state_at(len(first.prompt)) is None
    assert Lamp().chance == 0.5 and Lamp().num_operations == 0
    found = cp.tasks.accuracy(Lamp().examples(3), ["on", "off", "off."])
    assert (found.num_correct, found.num_examples) == (2, 3)


def test_states_hold_from_the_word_that_sets_them() -> None:
    tokenizer = word_tokenizer(LampWithStates().vocabulary())
    first, second, third = LampWithStates().examples(3)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(first.prompt)["input_ids"])
    after = dict(zip(tokens[:8], first.states_after_tokens(tokenizer)[:8], strict=True))
    assert after["is"] is None and after["off"] == "off" and after["Bob"] == "off" and after["presses"] == "on"
    assert first.states_after_tokens(tokenizer)[-1] == "on"
    assert first.events == ("presses",) and first.states == ("off", "on")
    assert second.events == () and second.states == ("on",) and third.states == ("off",)
    with pytest.raises(ValueError, match="questions of LampWithStates have 0 to 1 operations"):
        _ = LampWithStates().num_operations


def test_the_order_is_that_of_the_list_or_of_the_seed() -> None:
    orders = [tuple(example.prompt for example in Lamp().examples(3, seed)) for seed in range(8)]
    assert orders[0] == Lamp.prompts and len(set(orders)) > 1
    assert all(sorted(order) == sorted(Lamp.prompts) for order in orders)


def test_a_run_of_it_is_scored() -> None:
    model = cp.load_model("coinflip-plain", progress=False)

    class Coin(cp.tasks.ListedTask):
        prompts = tuple(example.prompt for example in cp.tasks.CoinFlip(people=2).examples(2))
        answers = tuple(example.answer for example in cp.tasks.CoinFlip(people=2).examples(2))

    scored = cp.run(model, Coin().examples(2), max_new_tokens=1, progress=False)
    assert scored.meta["behaviour"]["num_examples"] == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(answers=(" on",)), "3 prompts, 1 answers and 0 lists of states; give one of each"),
        (dict(states=((None, "on"),) * 3), "has 9 words, and 2 states are listed"),
        (dict(states=(("on", *[None] * 8),) * 3), "no state is listed after 'The lamp'; a state holds until the next"),
    ],
)
def test_lists_that_do_not_fit_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        type("Wrong", (Lamp,), fields)().example(0)


def test_more_questions_than_listed_are_refused() -> None:
    with pytest.raises(ValueError, match="Lamp has 3 questions, 0 to 2, and no question 3"):
        Lamp().examples(4)
    with pytest.raises(ValueError, match="it makes none of 5 operations"):
        Lamp().with_operations(5)
