import time

from hypothesis import given
from hypothesis import strategies as st

from attention_client.serve.stop import StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str], unsearched: int = 0) -> tuple[str, bool]:
    """What the class promises, said another way: watch the text grow, character by character."""
    for end in range(unsearched + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - len(max(matches, key=len))], True
    return text, False


@given(TEXT, STOPS, st.data())
def test_result_does_not_depend_on_the_pieces(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    strings, out, rest = StopStrings(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        out += strings.push(rest[:size])
        rest = rest[size:]
    out += strings.flush()
    assert (out, strings.matched) == cut(text, stops)


@given(TEXT, TEXT, STOPS)
def test_a_stop_string_ends_nothing_where_none_is_looked_for(
    before: str, after: str, stops: list[str]
) -> None:
    strings = StopStrings(stops)
    out = "".join(strings.push(character, search=False) for character in before)
    out += "".join(strings.push(character) for character in after) + strings.flush()
    assert (out, strings.matched) == cut(before + after, stops, unsearched=len(before))


@given(TEXT, STOPS)
def test_nothing_is_shown_that_must_be_taken_back(text: str, stops: list[str]) -> None:
    strings, out = StopStrings(stops), ""
    for character in text:
        out += strings.push(character)
        assert cut(text, stops)[0].startswith(out)


def test_a_possible_beginning_is_held_back_and_only_that() -> None:
    strings = StopStrings(["END"])
    assert strings.push("x E") == "x "
    assert strings.push("N") == ""
    assert strings.push("x") == "ENx"
    assert strings.push("EN") == ""
    assert strings.flush() == "EN"


def test_without_stop_strings_everything_passes() -> None:
    assert StopStrings([]).push("abc") == "abc"


def test_a_token_costs_no_more_with_long_strings_than_with_short_ones() -> None:
    """The text is always a beginning of the string that is nearly whole."""

    def seconds(length: int) -> float:
        strings, times = StopStrings(["a" * length + "b"]), []
        strings.push("a" * length)
        for _ in range(5):
            begun = time.process_time()
            for _ in range(100):
                assert strings.push("aa") == "aa"
            times.append(time.process_time() - begun)
        return min(times)

    assert seconds(200_000) < 20 * seconds(20)
