"""Which saved parameter is which of ours: names, identities, positions, and contradictions."""

import pytest

from fc_optim.checkpoint.matching import Pairing, Place, pair
from fc_optim.params.names import param_id


def given(names):
    return [Place(n, given=n, param_id=param_id(n)) for n in names]


def labelled(names, first=0):
    """Unnamed at construction, bound to a model."""
    return [
        Place(n, labels=(n,), param_id=param_id(f"param.{first + i}")) for i, n in enumerate(names)
    ]


def unnamed(n, first=0):
    return [Place(f"number {i}", param_id=param_id(f"param.{i}")) for i in range(first, first + n)]


def keyed(names):
    """As `torch.distributed.checkpoint` keys a plain torch state."""
    return [Place(n, labels=(n,)) for n in names]


def flat(*buffers):
    return [Place(b[0], labels=tuple(b)) for b in buffers]


PAIRS = {
    "the same": ([given("ab")], [given("ab")], [0, 1], [0], "names"),
    "another order": ([given("abc")], [given("cab")], [2, 0, 1], [0], "names"),
    "a wrapper there": ([given(["module.a", "module.b"])], [given("ba")], [1, 0], [0], "names"),
    "a wrapper here": (
        [given("ab")], [given(["_orig_mod.b", "_orig_mod.a"])], [1, 0], [0], "names",
    ),
    "an attribute that is called as a wrapper": (
        [given(["module.w", "w"])], [given(["w", "module.w"])], [1, 0], [0], "names",
    ),
    "the same, bound": (
        [labelled(["module.w", "w"])], [labelled(["w", "module.w"])], [1, 0], [0], "names",
    ),
    "groups in another order": (
        [given("ab"), given("c")], [given("c"), given("ba")], [2, 1, 0], [1, 0], "names",
    ),
    "an empty group": ([[], given("a")], [given("a"), []], [0], [1, 0], "names"),
    "bound on both sides": ([labelled("qk")], [labelled("kq")], [1, 0], [0], "names"),
    "named there, bound here": ([given("qk")], [labelled("kq")], [1, 0], [0], "names"),
    "keys that are names": ([keyed("qk")], [given("kq")], [1, 0], [0], "names"),
    "other names, the same labels": (
        [[Place("p.a", "p.a", ("a",)), Place("p.b", "p.b", ("b",))]],
        [[Place("b", "b", ("b",)), Place("a", "a", ("a",))]], [1, 0], [0], "names",
    ),
    "names on one side": ([given("qk")], [unnamed(2)], [0, 1], [0], "position"),
    "names on the other": ([unnamed(2)], [given("qk")], [0, 1], [0], "position"),
    "no names": ([unnamed(1), unnamed(1, 1)], [unnamed(1), unnamed(1, 1)], [0, 1], [0, 1],
                 "identities"),
    "identities of a named run": (
        [[Place("0", param_id=param_id("q")), Place("1", param_id=param_id("k"))]],
        [given("kq")], [1, 0], [0], "identities",
    ),
    "a prefix of another wrapper, the same identities": (
        [labelled("ab")], [labelled(["base.a", "base.b"])], [0, 1], [0], "identities",
    ),
    "names of a part, keys of the whole": (
        [[Place("actor.w", labels=("actor.w",), param_id=param_id("w"))]], [given("w")],
        [0], [0], "identities",
    ),
    "plain torch": ([[Place("0"), Place("1")]], [given("ab")], [0, 1], [0], "position"),
    "plain flat buffers": ([[Place("0"), Place("1")]], [flat("ab", "cd")], [0, 1], [0], "position"),
    "flat buffers": ([flat("ab", "cd")], [flat("cd", "ab")], [1, 0], [0], "names"),
    "one without an identity": (
        [[Place("0"), Place("1", param_id=param_id("b"))]], [given("ab")], [0, 1], [0],
        "identities",
    ),
    "a clash of identities": (
        [[Place("0", param_id=7), Place("1", param_id=7)]],
        [[Place("0", param_id=7), Place("1", param_id=7)]], [0, 1], [0], "position",
    ),
    "nothing": ([[]], [[]], [], [0], "position"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    saved, mine, places, groups, by = PAIRS[name]
    assert pair(saved, mine) == Pairing(places, groups, by)


REFUSED = {
    "extra": ([given("abc")], [given("ab")], r"\[3\] parameters.*\[2\].*Only the state has 'c'"),
    "missing": ([given("ab")], [given("abc")], r"\[2\].*\[3\].*Only this optimizer has 'c'"),
    "replaced": ([given("ab")], [given("ac")], "Only the state has 'b'.*this optimizer has 'c'"),
    "all renamed": ([given("ab")], [given("cd")], "state has 'a', 'b'.*optimizer has 'c', 'd'"),
    "renamed keys": ([keyed("ab")], [given("cd")], "state has 'a', 'b'.*optimizer has 'c', 'd'"),
    "unnamed, of other sizes": ([unnamed(1), unnamed(2, 1)], [unnamed(2), unnamed(1, 2)],
                                "'number 1' moved from group 1 of the state to group 0 here"),
    "plain, of other sizes": ([[Place("0")], [Place("1"), Place("2")]],
                              [unnamed(2), unnamed(1, 2)], r"\[1, 2\] parameters.*\[2, 1\]"),
    "a parameter that moved": (
        [given("ab"), given("cd")], [given("abc"), given("d")],
        "'c' moved from group 1 of the state to group 0 here",
    ),
    "two that changed places": (
        [given("ab"), given("cd")], [given("ac"), given("bd")], "'c' moved from group 1 of",
    ),
    "one group became two": (
        [given("ab")], [given("a"), given("b")], r"\[2\] parameters.*\[1, 1\]",
    ),
    "a name twice": ([given("aa")], [given("ab")], "param_names has 'a' twice"),
    "a cleaned name twice": (
        [given(["module.a", "module.a"])], [given("ab")], "param_names has 'module.a' twice",
    ),
    "names without their entries": (
        [[Place("q", "q", param_id=param_id("k")), Place("k", "k", param_id=param_id("q"))]],
        [given("qk")], "the entry of 'q' has the identity .* of 'k'",
    ),
    "one that was left empty": (
        [given("ab"), []], [given("a"), given("b")], r"\[2, 0\] parameters.*\[1, 1\]",
    ),
    "one label of several": (
        [labelled("ab")], [labelled("bc")], "Only the state has 'a'. Only this optimizer has 'c'",
    ),
    "one label at another place": (
        [[*labelled("ab"), *unnamed(1, 2)]], [[*unnamed(2), *labelled("a", 2)]],
        "'a' would be loaded from the entry of 'number 2'",
    ),
    "a given name of several at another place": (
        [[Place("a", "a"), Place("b", "b")], [Place("2")]], [given("ba"), given("c")],
        "'a' would be loaded from the entry of 'b'",
    ),
    "parts of a buffer in another order": (
        [flat("ab")], [flat("ba")], "Flat buffers hold the parameters in another way",
    ),
    "identities that moved, and no word of the rest": (
        [[Place("0"), Place("1"), *(Place("x", param_id=param_id(n)) for n in "cd")]],
        [given("abdc")], "by their identities .* 'd', 'c' are elsewhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_by_name(name):
    saved, mine, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        pair(saved, mine)
