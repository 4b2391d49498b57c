"""Packaging: what importing pulls in, what an installation holds, what the names shadow."""

import ast
import importlib
import shutil
import subprocess
import sys
import tarfile
import types
import warnings
import zipfile
from pathlib import Path

import pytest
from ranks import spawn

import fc_optim

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ["numba", "triton", "numpy.testing", "matplotlib", "pandas", "accelerate", "deepspeed"]
HEAVY += ["transformers", "trl", "vllm", "sglang", "verl", "peft", "rich", "typer", "IPython"]


def run(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_pulls_in_no_framework_and_no_compiler(tmp_path):
    code = "import sys, torch; before = set(sys.modules); import fc_optim; "
    code += f"print([m for m in {HEAVY} if m in set(sys.modules) - before])"
    assert run(code, tmp_path) == "[]"


NEEDS = {  # integration: framework
    **{name: name for name in ("accelerate", "peft", "transformers", "vllm")},
    "openrlhf": "deepspeed",
    "trl": "transformers",
}


def import_without(rank: int, world: int, rendezvous: str, module: str, package: str) -> None:
    """In a process of its own: first without the framework, then with an old one."""
    warnings.simplefilter("error")
    old = types.ModuleType(package)
    old.__version__ = "0.1.2"  # type: ignore[attr-defined]
    for fake, said in ((None, "it is not installed"), (old, "(0.1.2 is installed")):
        sys.modules[package] = fake  # type: ignore[assignment]
        with pytest.raises(ImportError) as caught:
            importlib.import_module(f"fc_optim.integrations.{module}")
        (line,) = str(caught.value).splitlines()
        assert f"pip install '{package}>=" in line and said in line


@pytest.mark.parametrize(("module", "package"), NEEDS.items())
def test_a_missing_or_old_framework_is_one_line(module: str, package: str, tmp_path: Path) -> None:
    spawn(import_without, 1, tmp_path, module, package)


def test_the_folder_kernels_does_not_shadow_the_package_of_that_name(tmp_path):
    """Hugging Face's `kernels` must win even in the repository's root (a regular package does)."""
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "integrations/__init__.py").exists()
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("REAL = True\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.REAL)"
    assert run(code, ROOT) == "True"


def test_modules_come_through_the_package():
    from fc_optim.kernels import batch, reference

    assert batch.__name__ == "fc_optim.kernels.batch"
    assert reference.Batch is batch.Batch


def test_test_files_import_no_test_file():
    """What several share is in a file that is no test; so tests can move and be split."""
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            found = [getattr(node, "module", None) or ""] * isinstance(node, ast.ImportFrom)
            found += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("test_") for name in found), (file, found)


def test_version_and_type_marker():
    assert f'version = "{fc_optim.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {fc_optim.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "fc_optim/py.typed").exists()


@pytest.mark.integration
def test_wheel_and_sdist_hold_the_code_once(tmp_path):
    tree = tmp_path / "tree"  # building leaves folders behind
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(tree)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("fc_optim/optimizer.py", "fc_optim/kernels/reference.py", "fc_optim/py.typed"):
        assert names.count(name) == 1
    assert "fc_optim/integrations/accelerate.py" in names
    assert not any(n.startswith(("kernels/", "integrations/", "tests/")) for n in names)
    assert any(n.endswith("kernels/reference.py") for n in tarfile.open(sdist).getnames())


def test_the_reference_runs_where_numba_is_missing_with_one_warning(tmp_path):
    (tmp_path / "script.py").write_text(
        """
import importlib.util, sys, warnings
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "numba" else real(name, *a)
import torch, fc_optim
p = torch.nn.Parameter(torch.ones(5))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        opt = fc_optim.FairCastAdamW([p])
        p.grad = torch.ones(5)
        opt.step()
print(len(caught), "pip install 'fc_optim[cpu]'" in str(caught[0].message), "numba" in sys.modules)
try:
    fc_optim.FairCastAdamW([torch.nn.Parameter(torch.ones(2))], backend="cpu").publish()
except ImportError as error:
    print(error)
"""
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "1 True False",
        "backend: 'cpu' needs numba: pip install 'fc_optim[cpu]'",
    ]


ROOMS = (
    *("kernels", "params", "update", "weights", "checkpoint", "serving", "metrics", "construct"),
    *("optimizer", "sync", "audit", "integrations"),
)


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, inside of functions too."""
    tree = ast.parse(path.read_text())
    typing = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    found: set[str] = set()
    for node in (n for n in tree.body if n not in typing):
        for part in ast.walk(node):
            if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("fc_optim"):
                module = part.module or ""
                found |= {module, *(f"{module}.{name.name}" for name in part.names)}
    return found


def package_imports() -> dict[str, set[str]]:
    """Of every module, the modules of this package that it imports."""
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts): p
        for p in (ROOT / "fc_optim").rglob("*.py")
    }
    for folder in ("kernels", "integrations"):  # behind links, which rglob does not follow
        files |= {f"fc_optim.{folder}.{p.stem}": p for p in (ROOT / folder).glob("*.py")}
    return {name: imports_of(p) & files.keys() - {name} for name, p in files.items()}


def test_no_module_imports_in_a_circle():
    left = package_imports()
    assert len(left) > 80
    while left:
        free = {name for name, needs in left.items() if not needs & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {name: needs for name, needs in left.items() if name not in free}


def test_rooms_are_built_on_those_above_alone():
    """Of the map in CONTRIBUTING; the public interface of `optimizer` is for those below it."""
    place = {room: i for i, room in enumerate(ROOMS)}
    for name, needs in package_imports().items():
        room = name.split(".")[1] if "." in name else ""
        for need in needs:
            other = need.split(".")[1] if "." in need else ""
            if room in place and other in place:
                assert place[other] <= place[room], f"{name} imports {need}"
