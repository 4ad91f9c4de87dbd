"""Finding reward functions by name: built-ins, `module:function` and `path/to/file.py:function`.

Importing runs the user's code, so whatever it raises becomes one sentence here. Scoring is in rewards.py.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlneuron.builtin_rewards import BUILTIN_FACTORIES, BUILTIN_REWARDS, unknown_builtin
from rlneuron.config_sections import RewardCall

# What the run itself passes to every function, besides the columns of the data.
PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function and the name that metrics and errors give it."""

    name: str
    call: Callable[..., Any]

    @property
    def is_async(self) -> bool:
        # A class with an async __call__ counts too.
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the function names, or all of them if it takes **kwargs (TRL's contract asks for that)."""
        parameters = self._parameters()
        if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return dict(arguments)
        return {name: value for name, value in arguments.items() if name in parameters}

    def required(self) -> list[str]:
        """Names of the columns that the function cannot be called without."""
        return [
            name
            for name, parameter in (self._parameters() or {}).items()
            if name not in PROVIDED
            and parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]

    def _parameters(self) -> Mapping[str, inspect.Parameter] | None:
        try:
            return inspect.signature(self.call).parameters
        except (TypeError, ValueError):
            return None


def load_rewards(specs: Sequence[RewardCall | str]) -> list[RewardFunction]:
    """All functions of a run. ValueError if one cannot be found, or two have the same name."""
    functions = [load_reward(spec) for spec in specs]
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"reward.funcs: {names.count(name)} functions are called {name!r}; give them names of their own with "
                "{func: ..., name: ...}"
            )
    return functions


def load_reward(spec: RewardCall | str) -> RewardFunction:
    """One function. ValueError in one sentence for anything that keeps it from being found or made."""
    entry = RewardCall(func=spec) if isinstance(spec, str) else spec
    found = _find(entry.func)
    if entry.args is not None:
        try:
            found = found(**entry.args)
        except Exception as error:
            raise ValueError(
                f"reward.funcs: {entry.func} could not be called with args {entry.args}: {_reason(error)}"
            ) from error
        if not callable(found):
            raise ValueError(
                f"reward.funcs: {entry.func} was called with its args and returned {type(found).__name__}, not a "
                "reward function; leave args out if it is the reward function itself"
            )
    elif inspect.isclass(found):
        raise ValueError(f"reward.funcs: {entry.func} is a class; write args: {{}} to make an instance of it")
    elif found in BUILTIN_FACTORIES.values():
        names = ", ".join(inspect.signature(found).parameters)
        raise ValueError(f"reward.funcs: {entry.func} needs args; write {{func: {entry.func}, args: {{{names}: ...}}}}")
    return RewardFunction(entry.name or _name_of(found), found)


def check_columns(functions: Sequence[RewardFunction], columns: Collection[str]) -> None:
    """ValueError if a function needs a column that the data does not have. Costs nothing; run it before loading."""
    for function in functions:
        for name in function.required():
            if name not in columns:
                near = difflib.get_close_matches(name, list(columns), n=1)
                nearest = f"; nearest: {near[0]}" if near else ""
                raise ValueError(
                    f"reward.funcs: {function.name!r} needs the column {name!r}, which the data does not have; "
                    f"its columns: {', '.join(columns) or 'none'}{nearest}"
                )


def _name_of(function: Any) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def _find(spec: str) -> Callable[..., Any]:
    place, colon, name = spec.rpartition(":")
    if not colon:
        if spec in BUILTIN_REWARDS:
            return BUILTIN_REWARDS[spec]
        if spec in BUILTIN_FACTORIES:
            return BUILTIN_FACTORIES[spec]
        raise ValueError(f"reward.funcs: {unknown_builtin(spec)}")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = getattr(module, name, None)
    if found is None:
        names = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        nearest = f"; nearest: {near[0]}" if near else f"; it has: {', '.join(names) or 'no functions'}"
        raise ValueError(f"reward.funcs: {place} has no function {name!r}{nearest}")
    if not callable(found):
        raise ValueError(f"reward.funcs: {spec} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"reward.funcs: the file {str(path)!r} does not exist")
    path = path.resolve()
    # A private name: the user's "math.py" must not replace the module of that name.
    name = f"_rlneuron_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _append_to_path(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"reward.funcs: {path} could not be imported: {_reason(error)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    _append_to_path(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward.funcs: the module {name!r} could not be imported: {_reason(error)}") from error


def _append_to_path(folder: str) -> None:
    # At the end, so that nothing installed is shadowed by a file of the same name.
    if folder not in sys.path:
        sys.path.append(folder)


def _reason(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
