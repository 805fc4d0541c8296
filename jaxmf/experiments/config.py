"""Configs: what may stand in a YAML file, and one clear sentence for what may not."""

import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from .. import laws
from ..attention import Attention
from ..errors import InputError
from ..flows import RK4, AbstractMethod, Adaptive, Euler, Midpoint

EXPERIMENTS = (
    "collapse",
    "concentration",
    "distance_bias",
    "gauge_law",
    "laplace",
    "orbit_law",
    "prefix",
    "pretrained",
    "rope",
    "rope_generalised",
    "terminal",
    "timescale",
    "toeplitz",
)


class Model(pydantic.BaseModel):
    """A config or a part of one: unknown keys are refused and types are taken at their word."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"it must be finite, not {value}")
    return value


Number = Annotated[float, AfterValidator(_finite)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_finite)]
Count = Annotated[int, Field(ge=1)]


def check_matrix(value: Any) -> Any:
    """A matrix of a config, if it is one: nested lists of numbers, {diag: [...]} or identity."""
    if value == "identity":
        return value
    diagonal = isinstance(value, dict) and list(value) == ["diag"]
    rows = [value["diag"]] if diagonal else value
    numbers = (int, float)
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(row, list) and row for row in rows)
        or not all(isinstance(x, numbers) and not isinstance(x, bool) for row in rows for x in row)
    ):
        raise ValueError("it must be a matrix: nested lists of numbers, {diag: [...]} or identity")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"it has rows of different lengths, {[len(row) for row in rows]}")
    if not all(math.isfinite(x) for row in rows for x in row):
        raise ValueError("it has entries that are not finite")
    return value


Matrix = Annotated[Any, AfterValidator(check_matrix)]


def as_array(matrix: Any, dimension: int) -> np.ndarray:
    """A `Matrix` as an array; `identity` is of size `dimension`."""
    if matrix == "identity":
        return np.eye(dimension)
    if isinstance(matrix, dict):
        return np.diag(np.asarray(matrix["diag"], np.float64))
    return np.asarray(matrix, np.float64)


class UniformLaw(Model):
    """The uniform law."""

    name: Literal["uniform"]

    def build(self, dimension: int) -> laws.AbstractLaw:
        return laws.Uniform(dimension)


class VonMisesFisherLaw(Model):
    """Density ∝ e^{κ⟨mean, x⟩}; the mean direction is normalised."""

    name: Literal["von_mises_fisher"]
    mean: Annotated[list[Number], Field(min_length=2)]
    kappa: Annotated[float, Field(ge=0), AfterValidator(_finite)]

    def build(self, dimension: int) -> laws.AbstractLaw:
        return laws.VonMisesFisher(self.mean, self.kappa)


class MixtureLaw(Model):
    """A mixture of laws, in equal proportions or by `weights`."""

    name: Literal["mixture"]
    components: Annotated[list["Law"], Field(min_length=1)]
    weights: list[Annotated[float, Field(ge=0)]] | None = None

    def build(self, dimension: int) -> laws.AbstractLaw:
        return laws.Mixture([law.build(dimension) for law in self.components], self.weights)


class FileLaw(Model):
    """The tokens of a `.npy` or `.npz` file, normalised."""

    name: Literal["file"]
    path: str

    def build(self, dimension: int) -> laws.AbstractLaw:
        return laws.load_tokens(self.path)


Law = Annotated[UniformLaw | VonMisesFisherLaw | MixtureLaw | FileLaw, Field(discriminator="name")]


class TokensConfig(Model):
    """How many tokens, and how they are placed: quadrature nodes of the law or samples from it;
    `graded` nodes, on the circle, crowd where concentration would thin out the others.

    The count may be left out for a law given by a file, whose quadrature is the file's tokens.
    """

    count: Count | None = None
    placement: Literal["quadrature", "graded", "sample"] = "quadrature"


class AttentionConfig(Model):
    """V, and B = QᵀK or Q and K apart."""

    value: Matrix
    key_query: Matrix | None = None
    query: Matrix | None = None
    key: Matrix | None = None

    @pydantic.model_validator(mode="after")
    def _one_way(self):
        apart = (self.query is not None, self.key is not None)
        if (self.key_query is None) != all(apart) or (self.key_query is not None and any(apart)):
            raise ValueError("it needs key_query (B = QᵀK), or query and key, and not all three")
        return self

    def arrays(self, dimension: int) -> tuple[np.ndarray, np.ndarray]:
        """V and B in double precision."""
        v = self._square("value", dimension)
        if self.key_query is not None:
            return v, self._square("key_query", dimension)
        q, k = as_array(self.query, dimension), as_array(self.key, dimension)
        for name, matrix in (("query", q), ("key", k)):
            if matrix.shape[1] != dimension or len(matrix) != len(q):
                raise InputError(
                    f"attention.{name} has shape {_shape(matrix)}; it must be r × {dimension} "
                    f"(dimension = {dimension}), with the same r for query and key"
                )
        return v, q.T @ k

    def build(self, dimension: int) -> Attention:
        v, b = self.arrays(dimension)
        try:
            return Attention(np.asarray(v, dtype=float), b)
        except InputError as error:
            raise InputError(f"attention.{error}") from None

    def _square(self, name: str, dimension: int) -> np.ndarray:
        matrix = as_array(getattr(self, name), dimension)
        if matrix.shape != (dimension, dimension):
            raise InputError(
                f"attention.{name} has shape {_shape(matrix)}; it must be square, "
                f"{dimension} × {dimension} (dimension = {dimension})"
            )
        return matrix


def _shape(matrix: np.ndarray) -> str:
    return " × ".join(str(n) for n in matrix.shape)


class TimeConfig(Model):
    """From 0 to `end` in `steps` equal steps, saved `save` times after the start.

    `method: adaptive` chooses its steps between saved times by rtol and atol, and ignores `steps`;
    the others ignore rtol and atol.
    """

    end: Positive
    steps: Count
    save: Count = 100
    method: Literal["euler", "midpoint", "rk4", "adaptive"] = "rk4"
    rtol: Positive = 1e-6
    atol: Positive = 1e-8

    @pydantic.model_validator(mode="after")
    def _divides(self):
        if self.method != "adaptive" and self.steps % self.save:
            below = self.steps - self.steps % self.save
            above = below + self.save
            right = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"steps = {self.steps} is not a multiple of save = {self.save}; {right} would be"
            )
        return self

    def times(self) -> np.ndarray:
        """The saved times, the start included."""
        return np.linspace(0, self.end, self.save + 1)

    def build(self) -> AbstractMethod:
        """The method, with its steps between two saved times."""
        if self.method == "adaptive":
            return Adaptive(rtol=self.rtol, atol=self.atol)
        kind = {"euler": Euler, "midpoint": Midpoint, "rk4": RK4}[self.method]
        return kind(steps=self.steps // self.save)


class DistanceConfig(Model):
    """How W₂ is found where it is not exact: to what relative width, in at most how many seconds
    for each distance; and its cost.
    """

    cost: Literal["chordal", "geodesic"] = "chordal"
    width: Positive = 0.02
    seconds: Positive = 10.0

    @property
    def units(self) -> str:
        """What such a distance is measured in."""
        return f"{'chord length' if self.cost == 'chordal' else 'angle'} on the unit sphere"


def listed(value: Any) -> Any:
    """A single value as a list of one."""
    return value if isinstance(value, list) else [value]


Betas = Annotated[list[Positive], Field(min_length=1), BeforeValidator(listed)]


class ExperimentConfig(Model):
    """What every experiment's config has."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    precision: Literal["float32", "float64"] = "float32"
    provenance: dict[str, Any] | None = Field(
        default=None, description="written by a run: versions, device, command; never read"
    )


def load(source: str | Path | dict, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """A validated config from a YAML file (or a mapping), with `key=value` overrides.

    Keys are dotted (`time.steps=800`), values YAML. Paths in the config are resolved against the
    folder of the config file, then against the working directory.

    **Raises:** `InputError` naming the key and what would be right.
    """
    folder = Path.cwd()
    if not isinstance(source, dict):
        folder = Path(source).parent
        content = _read(Path(source))
    else:
        content = source
    for override in overrides:
        content = _override(content, override)
    name = content.get("experiment")
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise InputError(
            f"config key experiment is {name!r}; it must be one of: {known}"
            if name is not None
            else f"config key experiment is missing; it must be one of: {known}"
        )
    model = module(name).Config
    try:
        return model.model_validate(_resolve_paths(content, folder))
    except pydantic.ValidationError as error:
        raise InputError(_sentence(error, model)) from None


def module(name: str):
    """The experiment of this name."""
    from importlib import import_module

    return import_module(f".{name}", __package__)


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as in YAML 1.2, and a key given twice is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise InputError(f"config key {twice[0]} is given twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise InputError(f"{where} is not valid YAML{line}: {problem}") from None


def _read(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config file {path} cannot be read: {error}") from None
    content = _parse(text, f"config file {path}")
    if not isinstance(content, dict):
        raise InputError(f"config file {path} must hold keys and values, such as `beta: [10, 100]`")
    return content


def _override(content: dict, override: str) -> dict:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise InputError(f"--set {override}: it must be key=value, such as time.steps=800")
    new = dict(content)
    here = new
    for i, part in enumerate(parts[:-1]):
        inner = here.get(part, {})
        if not isinstance(inner, dict):
            raise InputError(
                f"--set {override}: {'.'.join(parts[: i + 1])} is {inner!r}, which has no keys"
            )
        here[part] = dict(inner)
        here = here[part]
    here[parts[-1]] = _parse(value, f"--set {override}")
    return new


def _resolve_paths(content: Any, folder: Path) -> Any:
    """Paths (keys `path`, `text`, `checkpoint`) made absolute where the file exists."""
    if isinstance(content, list):
        return [_resolve_paths(item, folder) for item in content]
    if not isinstance(content, dict):
        return content
    new = {}
    for key, value in content.items():
        if key in ("path", "text", "checkpoint") and isinstance(value, str):
            for base in (folder, Path.cwd()):
                if (base / value).exists():
                    value = str((base / value).resolve())
                    break
            new[key] = value
        else:
            new[key] = value if key == "provenance" else _resolve_paths(value, folder)
    return new


def _sentence(error: pydantic.ValidationError, model: type[Model]) -> str:
    """The first problem, as one sentence with the key in it."""
    problem = error.errors(include_url=False)[0]
    # Discriminated unions put the tag into the location; a tag is not a key.
    tags = _all_tags(model)
    location = [part for part in problem["loc"] if part not in tags]
    key = ""
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    kind, given = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), _all_keys(model), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"config key {key} is unknown{hint}"
    if kind == "missing":
        return f"config key {key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be")
    if kind == "value_error":
        return f"config key {key}: {message}" if key else f"config: {message}"
    if kind == "too_short":
        return f"config key {key} must have at least {problem['ctx']['min_length']} item(s)"
    if kind == "model_type":
        return f"config key {key} must hold keys and values, not {given!r}"
    if kind == "union_tag_not_found":
        return f"config key {key}.name is missing"
    if kind == "union_tag_invalid":
        known = sorted(problem["ctx"]["expected_tags"].replace("'", "").split(", "))
        return f"config key {key}.name must be one of: {', '.join(known)}"
    return f"config key {key} {message[0].lower() + message[1:]}, not {given!r}"


def _all_keys(model: type[Model]) -> list[str]:
    return [key for part in _parts(model) for key in part.model_fields]


def _all_tags(model: type[Model]) -> set[str]:
    """What `name` may be, in the parts of a config that have one."""
    names = (part.model_fields["name"] for part in _parts(model) if "name" in part.model_fields)
    return {tag for name in names for tag in get_args(name.annotation)}


def _parts(model: type[Model]) -> list[type[Model]]:
    """The model and all models within it."""
    pending: list[Any] = [model]
    seen: list[type[Model]] = []
    while pending:
        item = pending.pop()
        if isinstance(item, type) and issubclass(item, Model) and item not in seen:
            seen.append(item)
            pending += [field.annotation for field in item.model_fields.values()]
        else:
            pending += list(getattr(item, "__args__", ()))
    return seen
