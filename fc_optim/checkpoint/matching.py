"""Which saved parameter is which of ours: by name, else by identity, else by position.

Pure data: two lists of places in, a pairing out, or a ValueError that names what contradicts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fc_optim.params.names import clean_name, listed, param_id

REMEDY = (
    "Build the optimizer with the parameters and groups that the state was saved with, call "
    "bind(model) with the model that has the state's names, or rename in the state dict."
)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the parameter groups of one side, and what is known of who is there.

    title: for messages.
    given: the name that the optimizer was built with.
    labels: the names in a bound model or a distributed checkpoint; several in a flat buffer.
    param_id: the identity that keys the random bits; unknown for a flat buffer.
    """

    title: str
    given: str | None = None
    labels: tuple[str, ...] = ()
    param_id: int | None = None


Groups = Sequence[Sequence[Place]]
Names = list[tuple[str, ...]]  # of every place of a side, in order


@dataclass(frozen=True, slots=True)
class Pairing:
    """What belongs together.

    places: for every parameter of ours, in order, which saved one it is.
    groups: for every group of ours which saved one it is.
    by: "names", "identities" or "position".
    """

    places: list[int]
    groups: list[int]
    by: str


def pair(saved: Groups, mine: Groups) -> Pairing:
    """Pair every parameter and every group of one side with one of the other.

    Names decide where both sides have them, then identities, then the position. Raises ValueError
    for parameters that only one side has, for two kinds of evidence that contradict each other,
    and for groups that do not hold the same parameters.
    """
    theirs, ours = ([p for group in side for p in group] for side in (saved, mine))
    sizes = _sizes(saved), _sizes(mine)
    if len(theirs) != len(ours) or len(saved) != len(mine):
        raise ValueError(_of_sizes(*sizes) + _differences(theirs, ours) + REMEDY)
    _refuse_twice(theirs)
    order, by = _by_names(theirs, ours), "names"
    if order is None:
        if _given(theirs) and _given(ours) or _overlap(_labels(theirs), _labels(ours)):
            raise ValueError("state_dict: other names." + _differences(theirs, ours) + REMEDY)
        order, by = _by_identities(theirs, ours), "identities"
    if order is None:
        if _best(theirs) and _best(ours):
            raise ValueError("state_dict: other names." + _differences(theirs, ours) + REMEDY)
        if sizes[0] != sizes[1]:
            raise ValueError(_of_sizes(*sizes) + " " + REMEDY)
        order, by = list(range(len(ours))), "position"
    if by != "names":
        _refuse_misplaced(theirs, ours, order)
    return Pairing(order, _pair_groups(saved, mine, order), by)


def _by_names(theirs: Sequence[Place], ours: Sequence[Place]) -> list[int] | None:
    """The saved place of the same name for each of ours; None if names are not the same set."""
    for saved in (_given(theirs), _labels(theirs)):
        for mine in (_given(ours), _labels(ours)):
            if saved and mine and set(saved) == set(mine):
                _refuse_strangers(theirs, saved)
                at = {name: i for i, name in enumerate(saved)}
                return [at[name] for name in mine]
    return None


def _by_identities(theirs: Sequence[Place], ours: Sequence[Place]) -> list[int] | None:
    """The same by `param_id`; None where too few are known, or they are all in place."""
    saved = {p.param_id: i for i, p in enumerate(theirs) if p.param_id is not None}
    mine = {p.param_id: i for i, p in enumerate(ours) if p.param_id is not None}
    known = sum(p.param_id is not None for p in theirs), sum(p.param_id is not None for p in ours)
    if known != (len(saved), len(mine)):  # a clash: two share their random bits
        return None
    common = saved.keys() & mine.keys()
    if not common:
        return None
    moved = [ours[at].title for at in sorted(mine[i] for i in common if saved[i] != mine[i])]
    rest = set(range(len(theirs))) - {saved[i] for i in common}
    if rest != set(range(len(ours))) - {mine[i] for i in common} or (moved and len(rest) > 1):
        raise ValueError(
            f"state_dict: by their identities (param_id) {some(moved)} are elsewhere in the "
            "state, and it does not say where the others are. " + REMEDY
        )
    order = list(range(len(ours)))  # one that only one side knows stays where it is
    for i in common:
        order[mine[i]] = saved[i]
    return order


def _cleaned(names: Sequence[str]) -> list[str]:
    """Names without the prefixes of wrappers, but as they are where two would become one."""
    cleaned = [clean_name(name) for name in names]
    times = Counter(cleaned)
    return [raw if times[own] > 1 else own for raw, own in zip(names, cleaned, strict=True)]


def _given(places: Sequence[Place]) -> Names | None:
    """The names that one side was built with, if they are all known and differ."""
    names = _cleaned([p.given for p in places if p.given is not None])
    whole = bool(names) and len(set(names)) == len(places)
    return [(name,) for name in names] if whole else None


def _labels(places: Sequence[Place]) -> Names | None:
    names = iter(_cleaned([name for p in places for name in p.labels]))
    labels = [tuple(next(names) for _ in p.labels) for p in places]
    whole = bool(labels) and all(labels) and len(set(labels)) == len(labels)
    return labels if whole else None


def _best(places: Sequence[Place]) -> Names:
    return _given(places) or _labels(places) or []


def _overlap(theirs: Names | None, ours: Names | None) -> bool:
    """Whether some names are known to both sides. None at all: one has another prefix."""
    saved, mine = ({name for own in side or [] for name in own} for side in (theirs, ours))
    return not saved.isdisjoint(mine)


def _refuse_strangers(theirs: Sequence[Place], names: Names) -> None:
    """Raise ValueError if an entry carries the identity of another name of the same state."""
    owner = {param_id(name): name for own in names for name in own}
    for place, own in zip(theirs, names, strict=True):
        other = owner.get(-1 if place.param_id is None else place.param_id)
        if other is not None and other not in own:
            raise ValueError(
                f"state_dict: the entry of {own[0]!r} has the identity (param_id) of {other!r}: "
                "entries or names of the state were reordered, each without the other. Load it "
                "as it was saved."
            )


def _refuse_twice(theirs: Sequence[Place]) -> None:
    count = Counter(_cleaned([p.given for p in theirs if p.given is not None]))
    twice = [name for name, n in count.items() if n > 1]
    if twice:
        raise ValueError(f"state_dict: param_names has {some(twice)} twice. " + REMEDY)


def _refuse_misplaced(theirs: Sequence[Place], ours: Sequence[Place], order: list[int]) -> None:
    """Raise ValueError where the pairing contradicts a name that both sides know."""
    for saved, mine in zip(_whereabouts(theirs), _whereabouts(ours), strict=True):
        for name in sorted(saved.keys() & mine.keys()):
            (theirs_at, part), (ours_at, own) = saved[name], mine[name]
            if order[ours_at] != theirs_at or part != own:
                raise ValueError(
                    f"state_dict: {name!r} would be loaded from the entry of "
                    f"{theirs[order[ours_at]].title!r}: names and identities (or positions) "
                    "contradict each other. " + REMEDY
                )


Whereabouts = dict[str, tuple[int, tuple[int, int]]]


def _whereabouts(places: Sequence[Place]) -> tuple[Whereabouts, Whereabouts]:
    """Where each given name and each label is: its place, which part of it, and of how many."""
    named = [(i, p.given) for i, p in enumerate(places) if p.given is not None]
    parts = [(i, k, p) for i, p in enumerate(places) for k in range(len(p.labels))]
    given = zip(_cleaned([name for _, name in named]), named, strict=True)
    labels = zip(_cleaned([p.labels[k] for _, k, p in parts]), parts, strict=True)
    return (
        {name: (i, (0, 1)) for name, (i, _) in given},
        {name: (i, (k, len(p.labels))) for name, (i, k, p) in labels},
    )


def _pair_groups(saved: Groups, mine: Groups, order: list[int]) -> list[int]:
    """The saved group of each of ours: the one with the same parameters."""
    home = [g for g, places in enumerate(saved) for _ in places]
    at = iter(order)
    sources = [[home[next(at)] for _ in places] for places in mine]
    found = [Counter(own).most_common(1)[0][0] if own else None for own in sources]
    for g, (source, own) in enumerate(zip(found, sources, strict=True)):
        moved = [p.title for p, s in zip(mine[g], own, strict=True) if s != source]
        if moved:
            there = next(s for s in own if s != source)
            raise ValueError(
                f"state_dict: {some(moved)} moved from group {there} of the state to group {g} "
                "here, so it is not known which hyper-parameters are meant: build the groups as "
                "they were saved."
            )
        if source is not None and found.count(source) > 1:
            raise ValueError(_of_sizes(_sizes(saved), _sizes(mine)) + " " + REMEDY)
    free = iter(g for g in range(len(saved)) if g not in found)
    return [next(free) if g is None else g for g in found]


def _sizes(groups: Groups) -> list[int]:
    return [len(g) for g in groups]


def _of_sizes(theirs: list[int], mine: list[int]) -> str:
    return (
        f"state_dict: its parameter groups have {theirs} parameters, this optimizer's have {mine}."
    )


def _differences(theirs: Sequence[Place], ours: Sequence[Place]) -> str:
    """Which names only one side has, for a message."""
    saved, mine = ({name for own in _best(side) for name in own} for side in (theirs, ours))
    if saved and saved == mine:
        return " Flat buffers hold the parameters in another way. "
    found = " "
    if saved and mine and saved - mine:
        found += f"Only the state has {some(sorted(saved - mine))}. "
    if saved and mine and mine - saved:
        found += f"Only this optimizer has {some(sorted(mine - saved))}. "
    return found


def some(names: Iterable[str]) -> str:
    """The first of many names, quoted, for a message."""
    return listed(map(repr, names))
