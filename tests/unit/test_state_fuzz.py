"""Random changes of state dicts: all fits by name after a load, or it raised and nothing changed.

`FC_FUZZ=states-long` runs fifty times as many.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, reject, settings
from hypothesis import strategies as st
from models import assert_equal_states
from state_cases import run, snapshot
from torch import nn

import fc_optim
from fc_optim import FairCastOptimizer
from fc_optim.params.names import STATE_KEYS, clean_name, param_id

COMMON: dict[str, Any] = {
    "derandomize": True, "deadline": None, "database": None,
    "suppress_health_check": list(HealthCheck),
}  # fmt: skip
settings.register_profile("states", max_examples=400, **COMMON)
settings.register_profile("states-long", max_examples=20_000, **COMMON)

NAMES = ("q", "k", "v", "o")  # of one shape, which gives nothing away
State = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]


# ---- What is saved, and what loads it


@dataclass(frozen=True)
class Kind:
    """How an optimizer of `NAMES` is made. named: "given", "bound" or "" (neither)."""

    base: type[torch.optim.Optimizer] = torch.optim.AdamW
    named: str = "given"
    second: Any = None  # what sets the second group apart; None: one group
    options: Any = ()

    def groups(self, params: list[tuple[str, nn.Parameter]]) -> Any:
        own: Any = params if self.named == "given" else [p for _, p in params]
        if self.second is None:
            return own
        halves = [[x for x, (n, _) in zip(own, params, strict=True) if (n in "vo") == side]
                  for side in (False, True)]  # fmt: skip
        return [{"params": halves[0], "lr": 0.01}, {"params": halves[1], "lr": 0.03, **self.second}]

    def make(self, order: tuple[str, ...], seed: int, ours: bool) -> tuple[nn.Module, Any]:
        generator = torch.Generator().manual_seed(seed)
        values = {n: torch.randint(-99, 99, (3, 2), generator=generator) / 64 for n in NAMES}
        model = nn.ParameterDict({n: nn.Parameter(values[n]) for n in order})
        groups = self.groups(list(model.named_parameters()))
        options = {"lr": 0.02, **dict(self.options)}
        if not ours:
            groups = [{k: v for k, v in g.items() if k != "served_dtype"} if isinstance(g, dict)
                      else g for g in groups]  # fmt: skip
            return model, self.base(groups, **options)
        opt = FairCastOptimizer(self.base, groups, backend="reference", **options)
        return model, opt.bind(model) if self.named == "bound" else opt


KINDS = {
    "adamw": Kind(),
    "amsgrad": Kind(options=(("amsgrad", True),)),
    "bound": Kind(named="bound"),
    "unnamed": Kind(named=""),
    "two groups": Kind(second={"weight_decay": 0.0}),
    "two bound groups": Kind(named="bound", second={"weight_decay": 0.0}),
    "excluded": Kind(second={"served_dtype": None}),
    "muon": Kind(second={"algorithm": "muon"}),
    "sgd": Kind(torch.optim.SGD, options=(("momentum", 0.9),), second={"weight_decay": 0.5}),
}
PLAIN = ("adamw", "amsgrad", "unnamed", "two groups", "sgd")


@pytest.fixture(scope="module")
def sources() -> dict[tuple[str, bool], State]:
    """The state of a few steps of every kind: ours, and plain torch's."""
    found = {}
    for name, kind in KINDS.items():
        for ours in (True, False)[: 1 + (name in PLAIN)]:
            model, opt = kind.make(NAMES, 0, ours)
            for i in range(3):
                generator = torch.Generator().manual_seed(i)
                for p in model.parameters():
                    p.grad = torch.randint(-99, 99, p.shape, generator=generator) / 64
                opt.step()
            found[name, ours] = copy.deepcopy(opt.state_dict())
    return found


# ---- Changes: some keep the meaning of a state dict, most do not


def parallel_lists(group: State) -> list[str]:
    return [k for k in ("params", "param_names") if isinstance(group.get(k), list)]


def a_group(draw: Draw, s: State) -> State:
    assume(s["param_groups"])
    return draw(st.sampled_from(s["param_groups"]))


def an_entry(draw: Draw, s: State) -> tuple[Any, Any]:
    entries = [(k, e) for k, e in s["state"].items() if isinstance(e, dict) and e]
    assume(entries)
    return draw(st.sampled_from(entries))


def a_key(draw: Draw, s: State) -> tuple[list[State], str]:
    """A key, and the entries that are meant: one, or all that have it."""
    _, entry = an_entry(draw, s)
    key = draw(st.sampled_from(sorted(entry)))
    everyone = [e for e in s["state"].values() if isinstance(e, dict) and key in e]
    return draw(st.sampled_from([[entry], everyone])), key


def declare_otherwise(draw: Draw, s: State) -> None:
    """Another order in a group: keys and names go together."""
    group = a_group(draw, s)
    order = draw(st.permutations(range(len(group["params"]))))
    for key in parallel_lists(group):
        assume(len(group[key]) == len(order))
        group[key] = [group[key][i] for i in order]


def reorder_groups(draw: Draw, s: State) -> None:
    s["param_groups"] = draw(st.permutations(s["param_groups"]))


def renumber(draw: Draw, s: State) -> None:
    """Other keys, everywhere."""
    change = draw(st.sampled_from([lambda k: k + 7, str]))
    keys = {k: change(k) for g in s["param_groups"] for k in g["params"] if isinstance(k, int)}
    rekey(s, keys)


def key_by_name(draw: Draw, s: State) -> None:
    """As `torch.distributed.checkpoint` does, which leaves `param_names` as they were saved."""
    groups = s["param_groups"]
    assume(all(isinstance(g.get("param_names"), list) for g in groups))
    names = [str(n) for g in groups for n in g["param_names"]]
    keys = [k for g in s["param_groups"] for k in g["params"]]
    assume(len(names) == len(keys) == len(set(names)))
    rekey(s, dict(zip(keys, names, strict=True)))
    if draw(st.booleans()):
        permute_names(draw, s)


def rekey(s: State, keys: dict[Any, Any]) -> None:
    for group in s["param_groups"]:
        group["params"] = [keys.get(k, k) for k in group["params"]]
    s["state"] = {keys.get(k, k): v for k, v in s["state"].items()}
    if "names" in s:
        s["names"] = {keys.get(k, k): v for k, v in s["names"].items()}


def add_prefix(draw: Draw, s: State) -> None:
    prefix = draw(st.sampled_from(["module.", "_orig_mod.", "model."]))
    for group in s["param_groups"]:
        if isinstance(group.get("param_names"), list):
            group["param_names"] = [f"{prefix}{n}" for n in group["param_names"]]
    if "names" in s:
        s["names"] = {k: [f"{prefix}{n}" for n in v] for k, v in s["names"].items()}


def permute_entries(draw: Draw, s: State) -> None:
    keys = list(s["state"])
    s["state"] = dict(zip(draw(st.permutations(keys)), s["state"].values(), strict=True))


def permute_names(draw: Draw, s: State) -> None:
    for group in s["param_groups"]:
        if isinstance(group.get("param_names"), list):
            group["param_names"] = list(draw(st.permutations(group["param_names"])))


def rename(draw: Draw, s: State) -> None:
    group = a_group(draw, s)
    assume(isinstance(group.get("param_names"), list) and group["param_names"])
    at = draw(st.integers(0, len(group["param_names"]) - 1))
    group["param_names"][at] = draw(st.sampled_from(["x", *NAMES]))


def drop_names(draw: Draw, s: State) -> None:
    a_group(draw, s).pop("param_names", None)
    s.pop("names", None)


def move(draw: Draw, s: State) -> None:
    """A parameter to another group, with its name."""
    assume(len(s["param_groups"]) == 2)
    source, target = draw(st.permutations(s["param_groups"]))
    assume(parallel_lists(source) == parallel_lists(target) and source["params"])
    for key in parallel_lists(source):
        target.setdefault(key, []).append(source[key].pop())


def drop_entry(draw: Draw, s: State) -> None:
    key, _ = an_entry(draw, s)
    if draw(st.booleans()):
        del s["state"][key]
    else:
        s["state"][key] = {}


def drop_key(draw: Draw, s: State) -> None:
    entries, key = a_key(draw, s)
    for entry in entries:
        del entry[key]


def rename_key(draw: Draw, s: State) -> None:
    entries, key = a_key(draw, s)
    for entry in entries:
        entry[key + "_"] = entry.pop(key)


def drop_parameter(draw: Draw, s: State) -> None:
    group = a_group(draw, s)
    assume(group["params"])
    at = draw(st.integers(0, len(group["params"]) - 1))
    for key in parallel_lists(group)[: draw(st.integers(1, 2))]:
        del group[key][at : at + 1]


def repeat_parameter(draw: Draw, s: State) -> None:
    group = a_group(draw, s)
    assume(len(group["params"]) > 1)
    group["params"][0] = group["params"][-1]


def drop_or_repeat_group(draw: Draw, s: State) -> None:
    group = a_group(draw, s)
    if draw(st.booleans()):
        s["param_groups"].remove(group)
    else:
        s["param_groups"].append(copy.deepcopy(group))


VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 2.5, "3", [], [0.5], {}, torch.ones(2)]
)


def drop_option(draw: Draw, s: State) -> None:
    group = a_group(draw, s)
    group.pop(draw(st.sampled_from(sorted(group))))


def retype_option(draw: Draw, s: State) -> None:
    group = a_group(draw, s)
    group[draw(st.sampled_from(sorted(group)))] = copy.deepcopy(draw(VALUES))


def retype_state(draw: Draw, s: State) -> None:
    entries, key = a_key(draw, s)
    for entry in entries:
        entry[key] = copy.deepcopy(draw(VALUES))


def cast(draw: Draw, s: State) -> None:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float64, torch.int32]))
    entries, key = a_key(draw, s)
    for entry in entries:
        if isinstance(entry[key], torch.Tensor):
            entry[key] = entry[key].to(dtype)


def truncate(draw: Draw, s: State) -> None:
    entries, key = a_key(draw, s)
    cut = draw(st.sampled_from([lambda t: t.reshape(-1)[:-1], lambda t: t[..., :1], torch.t,
                                lambda t: t.to("meta"), lambda t: t.new_empty(0)]))  # fmt: skip
    for entry in entries:
        if isinstance(entry[key], torch.Tensor) and entry[key].ndim:
            entry[key] = cut(entry[key])


def drop_masters(draw: Draw, s: State) -> None:
    assume(all(isinstance(e, dict) for e in s["state"].values()))
    s.update(fc_optim.without_masters(s))


CHANGES = [
    declare_otherwise, reorder_groups, renumber, key_by_name, add_prefix, permute_entries,
    permute_names, rename, drop_names, move, drop_entry, drop_key, rename_key, drop_parameter,
    repeat_parameter, drop_or_repeat_group, drop_option, retype_option, retype_state, cast,
    truncate, drop_masters,
]  # fmt: skip


# ---- What a load must have done


def saved_of(s: State, names: list[str], ids: list[int]) -> list[tuple[State, State]]:
    """The entry and group in a state dict for parameters of these names, in our order.

    By its names if it has them all, else by its identities if it has ours, else by position.
    """
    places = [(k, g) for g in s["param_groups"] for k in g["params"]]
    entries = [s["state"].get(k, {}) for k, _ in places]
    found = [n for g in s["param_groups"] for n in g.get("param_names") or [None]]
    if all(isinstance(k, str) and not k.isdigit() for k, _ in places):
        found = [k for k, _ in places]
    labels = [s.get("names", {}).get(k, [None])[0] for k, _ in places]
    known = [e.get("param_id") for e in entries]
    for own in (found, labels):
        if None not in own:
            at = {clean_name(n): i for i, n in enumerate(own)}
            if set(names) == at.keys():
                return [(entries[at[n]], places[at[n]][1]) for n in names]
    if None not in known and set(map(int, known)) == set(ids):
        at_id = {int(i): n for n, i in enumerate(known)}
        return [(entries[at_id[i]], places[at_id[i]][1]) for i in ids]
    return [(e, g) for e, (_, g) in zip(entries, places, strict=True)]


def assert_loaded(s: State, model: nn.Module, opt: FairCastOptimizer, ids: list[int]) -> None:
    anew = any("masters_from" in g for g in s["param_groups"])
    names = {p: n for n, p in model.named_parameters()}
    mine = [(g, p) for g in opt.param_groups for p in g["params"]]
    wanted = saved_of(s, [names[p] for _, p in mine], ids)
    for (group, p), (entry, theirs) in zip(mine, wanted, strict=True):
        own = opt.state.get(p, {})
        for key in ("lr", "weight_decay"):
            assert group[key] == theirs.get(key, group[key])
        assert ("master" in own) == ("master" in entry and not anew)
        for key, value in entry.items():
            if key == "master" and anew or key == "param_id" and "master" not in own:
                continue
            if isinstance(value, torch.Tensor):
                assert own[key].shape == value.shape or value.numel() == 1
                assert torch.equal(own[key].double().view(-1), value.double().view(-1)), key
            else:
                assert own[key] == value, key
        if "master" in own:
            assert own["master"].dtype == torch.float32
        if own and opt.fused:
            needed = {"momentum_buffer"} if group["algorithm"] == "muon" else {"step", "exp_avg"}
            assert needed <= own.keys()
    if any("master" in own for own in opt.state.values()):
        served = [p for g, p in mine if g["served_dtype"] is not None]
        assert all("master" in opt.state[p] for p in served)
        assert opt.check() == {}


@settings(settings.get_profile(os.environ.get("FC_FUZZ", "states")))
@given(data=st.data())
def test_it_fits_by_name_or_nothing_changes(sources, data):
    name, ours = data.draw(st.sampled_from(sorted(sources)))
    kind = KINDS[name]
    state = copy.deepcopy(sources[name, ours])
    for change in data.draw(st.lists(st.sampled_from(CHANGES), max_size=3)):
        try:
            change(data.draw, state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            reject()  # what an earlier change left is not what this one changes
    order = NAMES if kind.named == "" else tuple(data.draw(st.permutations(NAMES)))
    model, opt = kind.make(order, 9, ours=True)
    running = data.draw(st.booleans())
    if running:
        run(model, opt, 0, 1)
    ids = [slot.param_id for _, _, slot in opt.weights.registry.places(opt.param_groups)]
    before = snapshot(model, opt)
    kept = copy.deepcopy(state)
    try:
        opt.load_state_dict(state)
    except Exception as error:
        event(f"refused: {type(error).__name__}")
        assert_equal_states(snapshot(model, opt), before)
    else:
        event("loaded")
        own = any(key in entry for entry in kept["state"].values() for key in STATE_KEYS)
        if running and not any("masters_from" in g for g in kept["param_groups"]):
            assert own
        assert_loaded(kept, model, opt, ids)


def test_states_that_were_not_changed_load(sources):
    """Else all of the above might be refusals."""
    for (name, _), state in sources.items():
        kind = KINDS[name]
        order = NAMES[::-1] if kind.named else NAMES
        model, opt = kind.make(order, 9, ours=True)
        ids = [param_id(n) for n in (order if kind.named == "given" else
                                     [f"param.{i}" for i in range(4)])]  # fmt: skip
        opt.load_state_dict(copy.deepcopy(state))
        assert_loaded(state, model, opt, ids)
