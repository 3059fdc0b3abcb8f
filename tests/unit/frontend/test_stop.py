import time

from hypothesis import given
from hypothesis import strategies as st

from frontend.requests.text import StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str], unsearched: int = 0) -> tuple[str, bool]:
    """A reference implementation: check the text after each character."""
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
    assert (out, strings.matched is not None) == cut(text, stops)
    assert strings.matched is None or text.startswith(out + strings.matched)


@given(TEXT, TEXT, STOPS)
def test_a_stop_string_in_unsearched_text_does_not_match(
    before: str, after: str, stops: list[str]
) -> None:
    strings = StopStrings(stops)
    out = "".join(strings.push(character, search=False) for character in before)
    out += "".join(strings.push(character) for character in after) + strings.flush()
    assert (out, strings.matched is not None) == cut(before + after, stops, unsearched=len(before))


@given(TEXT, STOPS)
def test_shown_text_is_final(text: str, stops: list[str]) -> None:
    strings, out = StopStrings(stops), ""
    for character in text:
        out += strings.push(character)
        assert cut(text, stops)[0].startswith(out)


def test_only_a_possible_beginning_is_held_back() -> None:
    strings = StopStrings(["END"])
    assert strings.push("x E") == "x "
    assert strings.push("N") == ""
    assert strings.push("x") == "ENx"
    assert strings.push("EN") == ""
    assert strings.flush() == "EN"


def test_a_mark_does_not_break_a_stop_string() -> None:
    strings = StopStrings(["a<b>"])
    assert strings.push("x a") == "x "
    assert strings.push("\ud800<c>\ud801") == "a\ud800<c>\ud801"
    assert strings.push("\ud800a\ud801<b>.") == ""
    assert (strings.matched, strings.push("y")) == ("a<b>", "")


def test_the_cost_of_a_token_does_not_depend_on_the_string_length() -> None:
    """The worst case: the text always ends with a long prefix of the string."""

    def seconds(length: int) -> float:
        strings, times = StopStrings(["a" * length + "b"]), []
        strings.push("a" * length)
        for _ in range(5):
            begun = time.process_time()
            for _ in range(100):
                assert strings.push("aa") == "aa"
            times.append(time.process_time() - begun)
        return min(times)

    assert seconds(1024) < 20 * seconds(20)  # the longest that a request may have
