"""How settings that differ are named."""

from draftsmith.errors import NOT_SET, differences


def test_leaves_that_differ_are_named_in_order_with_what_is_missing_on_either_side():
    before = {"a": {"b": 1, "same": [1, 2]}, "gone": None, "c": 3}
    now = {"a": {"b": 2, "same": [1, 2], "new": None}, "c": 3}
    assert differences(before, now) == [("a.b", 1, 2), ("gone", None, NOT_SET), ("a.new", NOT_SET, None)]
    assert f"{NOT_SET}" == "not set"
    assert differences(now, now) == []


def test_a_section_that_becomes_a_value_shows_both():
    assert differences({"a": {"b": 1}}, {"a": 5}) == [("a.b", 1, NOT_SET), ("a", NOT_SET, 5)]
