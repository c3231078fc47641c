"""Tunes a model: searches, compares the best variant with today's configuration in pairs, keeps everything.

Each measurement is written to ``tune.json`` before the next one; a search that was stopped tells its searcher
the file's measurements again and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from google.protobuf.json_format import MessageToDict

from conch import __version__
from conch.core.errors import InvalidArgumentError
from conch.core.temporary_folder import TemporaryFolder
from conch_tools.machine import machine_facts
from conch_tools.perf.measure.results import QUANTILES, Load, Point
from conch_tools.perf.measure.verdicts import judge
from conch_tools.perf.measuring import PerfInterrupted, run_perf
from conch_tools.perf.perf_settings import PerfSettings
from conch_tools.server_api import AskError
from conch_tools.tune.goals import THROUGHPUT, Limit, Objectives, excess, limits_json, paired_gain, score
from conch_tools.tune.measurement import LATENCIES, Measurement
from conch_tools.tune.searcher import Searcher, Variant
from conch_tools.tune.space import Space, apply_variant, make_space
from conch_tools.tune.trial_server import TrialError, TrialServer
from conch_tools.tune.tune_file import FormatError, TuneFile
from conch_tools.tune.variants import changed, config_diff, digest_of

FILE = "tune.json"
_SHORT_S = 1
_MOST_ERRORS = 0.01
_BEST = 10
_CLOSED_LOOP = Load("concurrency", 32)
_GPU = {"gpu_utilization": "utilization", "gpu_power": "power_w", "gpu_memory_used": "memory_bytes"}


class NotTunedError(Exception):
    """Today's configuration cannot be measured, so that there is nothing to compare with."""


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """Settings of a tuning run.

    Attributes:
        repository: Model repository, which is only read.
        load: Load of each window.
        budget_s: Seconds of load in the search.
        window_s: Seconds of a full window.
        pairs: Windows of the best and of today's configuration, at the end.
        search: Values by field as texts, instead of those that the tuner chooses; an empty list leaves a
            field out.
        others: Models that are loaded, too.
        serve_flags: More flags of the server.
    """

    repository: Path
    model: str
    folder: Path
    objectives: Objectives = THROUGHPUT
    limits: Sequence[Limit] = ()
    load: Load = _CLOSED_LOOP
    budget_s: int = 300
    window_s: int = 5
    warm_up_s: int = 1
    pairs: int = 5
    batch: int = 1
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    data: Sequence[str | Path] = ("random",)
    search: Mapping[str, Sequence[str]] = field(default_factory=dict)
    others: Sequence[str] = ()
    serve_flags: Sequence[str] = ()
    seed: int = 0
    restart: bool = False
    arguments: Sequence[str] = ()


def run_tune(settings: TuneSettings, done: Callable[[Measurement], object] = lambda one: None) -> TuneFile:
    """Tunes a model, or continues.

    Raises:
        ConchError: The model, its config or a field to search is wrong.
        FormatError: The folder has the file of another search.
        NotTunedError: Today's configuration cannot be measured.
        SettingError, DataError: Data or shapes do not fit the model.
        AskError, LoadError, TrialError: The server does not start or answer, or the load can't be made.
        KeyboardInterrupt: All whole measurements are in the file.
    """
    machine = machine_facts()
    wanted = {*settings.objectives.weights, *(limit.name for limit in settings.limits)}
    if "gpu_memory" in wanted and not machine["gpu"]:
        raise InvalidArgumentError("gpu_memory needs an NVIDIA GPU; there is none here")
    settings.folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("conch-tune-") as folder:
        server = TrialServer(
            settings.repository,
            settings.model,
            folder,
            settings.others,
            settings.serve_flags,
            with_metrics=bool(machine["gpu"]),
        )
        try:
            return _Tuner(settings, server, machine, done).run()
        finally:
            server.close()


class _Tuner:
    def __init__(
        self,
        settings: TuneSettings,
        server: TrialServer,
        machine: Mapping[str, Any],
        done: Callable[[Measurement], object],
    ) -> None:
        self._settings, self._server, self._machine, self._done = settings, server, machine, done
        self._path = settings.folder / FILE

    def run(self) -> TuneFile:
        self._server.load({})
        self._config = self._server.config()
        self._space = self._make_space()
        self._today = self._space.today
        self._file = self._open()
        if self._file.result:
            return self._file
        self._seen = iter(tuple(self._file.measurements))
        try:
            best = self._search()
            self._compare(best)
        except KeyboardInterrupt:
            self._file.stopped_by = "user"
            self._file.write(self._path)
            raise
        self._file.best = self._best_measurements()
        self._file.write(self._path)
        return self._file

    def _make_space(self) -> Space:
        settings = self._settings
        can_go = True
        if self._config.HasField("dynamic_batching") and settings.search.get("batch", "0"):
            # Some backends complete a config without a batcher by one: then there is no variant without.
            try:
                self._server.load({"batch": 0})
                can_go = not self._server.config().HasField("dynamic_batching")
            except TrialError:
                can_go = False
        return make_space(self._config, settings.search, settings.batch, batcher_can_go=can_go)

    def _open(self) -> TuneFile:
        settings = self._settings
        source = settings.repository / settings.model
        server_version, model_version = self._server.versions()
        identity = {
            "server": {"version": server_version, "flags": list(settings.serve_flags)},
            "model": {"name": settings.model, "digest": digest_of(source)},
            "space": {name: list(values) for name, values in self._space.values.items()},
            "today": self._today,
            "objectives": dict(settings.objectives.weights),
            "constraints": limits_json(settings.limits),
            "load": {"mode": settings.load.mode, "value": settings.load.value, "batch": settings.batch},
            "data": [str(each) for each in settings.data],
            "shapes": {name: list(dims) for name, dims in settings.shapes.items()},
            "budget_s": settings.budget_s,
            "window_s": settings.window_s,
            "pairs": settings.pairs,
            "seed": settings.seed,
        }
        if self._path.exists() and not settings.restart:
            found = TuneFile.read(self._path)
            found.check_same(identity, self._path)
            return found
        config = MessageToDict(self._config, preserving_proto_field_name=True)
        facts = {
            "tool": {"version": __version__, "argv": list(settings.arguments), "seed": settings.seed},
            "machine": self._machine,
            "model": {"version": model_version, "config": config},
        }
        return TuneFile(identity, facts)

    def _search(self) -> dict[str, Any]:
        settings = self._settings
        searcher = Searcher(
            self._space.values,
            tuple(self._today.values()),
            settings.budget_s / (settings.window_s + settings.warm_up_s),
            settings.seed,
            self._effective,
        )
        while (asked := searcher.ask()) is not None:
            variant = self._named(asked[0])
            one = self._measure(variant, "search", asked[1])
            if one.failed and variant == self._today:
                raise NotTunedError(
                    f"today's configuration cannot be measured: {one.failed}; --restart tries again"
                )
            searcher.tell(*asked, score(one, settings.objectives, settings.limits))
        spent = searcher.spent + 1 > settings.budget_s / (settings.window_s + settings.warm_up_s)
        self._file.stopped_by = "budget" if spent else "converged"
        return self._named(searcher.ranking()[0])

    def _named(self, variant: Variant) -> dict[str, Any]:
        return dict(zip(self._space.values, variant, strict=True))

    def _effective(self, variant: Variant) -> Variant:
        return tuple(self._space.effective(self._named(variant)).values())

    def _compare(self, best: dict[str, Any]) -> None:
        """Measures the best and today's in turn, each as often first as second."""
        limits = self._settings.limits
        full = [one for one in self._file.measurements if one.variant == best and one.window == 1]
        if min(excess(one, limits) for one in full) > 1:
            self._file.result = _result_without_winner(_nearest(self._file, limits), met=False)
            return
        if best == self._today:
            self._file.result = _result_without_winner("No variant is better than today's.")
            return
        pairs: list[tuple[Measurement, Measurement]] = []
        for number in range(self._settings.pairs):
            order = (self._today, best) if number % 2 == 0 else (best, self._today)
            two = [self._measure(variant, "compare", 1.0) for variant in order]
            old, new = two if number % 2 == 0 else reversed(two)
            pairs.append((old, new))
        self._file.result = self._judge(best, pairs)

    def _judge(
        self, best: dict[str, Any], pairs: Sequence[tuple[Measurement, Measurement]]
    ) -> dict[str, Any]:
        objectives, limits = self._settings.objectives, self._settings.limits
        news = sorted((new for _, new in pairs), key=lambda one: excess(one, limits))
        middle = news[len(news) // 2]
        olds = sorted((old for old, _ in pairs), key=lambda one: excess(one, limits))
        if excess(middle, limits) > 1:
            return _result_without_winner(_nearest(self._file, limits), met=False)
        gain = paired_gain([(objectives.value(old), objectives.value(new)) for old, new in pairs])
        if gain is None:
            return _result_without_winner("Too few windows were measured to compare.")
        text = f"{gain.value:+.1%} in {objectives}, with 95 % confidence {gain.low:+.1%} to {gain.high:+.1%}"
        helps = excess(olds[len(olds) // 2], limits) > 1
        if not gain.sure and not helps:
            sentence = f"No variant is surely better than today's; the best has {text}."
            return {**_result_without_winner(sentence), "gain": asdict(gain)}
        why = "; unlike today's it meets the limits" if helps else ""
        sentence = f"{describe(changed(best, self._today))} is better than today's: {text}{why}."
        diff = config_diff(self._server.text, best, self._today)
        return {"met": True, "winner": best, "gain": asdict(gain), "sentence": sentence, "diff": diff}

    def _measure(self, variant: dict[str, Any], purpose: str, window: float) -> Measurement:
        """The next measurement, from the file while it has one."""
        seen = next(self._seen, None)
        if seen is not None:
            if (seen.variant, seen.purpose, seen.window) != (variant, purpose, window):
                raise FormatError(f"{self._path} is of another version of the search: --restart begins again")
            return seen
        one = self._measure_now(variant, purpose, window)
        self._file.measurements.append(one)
        self._file.write(self._path)
        self._done(one)
        return one

    def _measure_now(self, variant: dict[str, Any], purpose: str, window: float) -> Measurement:
        settings = self._settings
        seconds = settings.window_s if window == 1 else _SHORT_S
        load = settings.load
        head: dict[str, Any] = {
            "variant": variant,
            "purpose": purpose,
            "window": window,
            "window_s": seconds,
            "load": {"mode": load.mode, "value": load.value},
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        try:
            self._server.load(changed(variant, self._today))
            self._check_served(variant)
            perf = PerfSettings(
                endpoint=self._server.endpoint,
                model=settings.model,
                loads=(load,),
                seconds=seconds,
                warm_up=settings.warm_up_s,
                batch=settings.batch,
                shapes=settings.shapes,
                data=settings.data,
                seed=settings.seed,
                metrics_url=self._server.metrics_url,
            )
            point = run_perf(perf).points[0]
        except (TrialError, AskError) as error:
            return Measurement(**head, failed=str(error))
        except PerfInterrupted:
            raise KeyboardInterrupt from None
        if point.generator.lost:
            return Measurement(**head, failed=" ".join(point.notes))
        if not point.answered or point.error_share > _MOST_ERRORS:
            codes = ", ".join(f"{count} {code}" for code, count in point.errors.items())
            failed = f"{point.error_share:.0%} of the requests failed: {codes or 'none was answered'}"
            return Measurement(**head, errors=dict(point.errors), failed=failed)
        return Measurement(**head, **_numbers(point, settings.batch), host_bytes=self._server.host_bytes())

    def _check_served(self, variant: Mapping[str, Any]) -> None:
        """Raises TrialError: the server has completed the config to another variant."""
        wanted = self._space.read(apply_variant(self._config, changed(variant, self._today)))
        served = self._space.read(self._server.config())
        if served != wanted:
            raise TrialError(f"the server serves it with {describe(changed(served, wanted))}")

    def _best_measurements(self) -> list[int]:
        """Places of the full windows with the highest scores."""
        settings = self._settings
        scores = {
            index: score(one, settings.objectives, settings.limits)
            for index, one in enumerate(self._file.measurements)
            if one.window == 1 and not one.failed
        }
        return sorted(scores, key=lambda index: -scores[index])[:_BEST]


def describe(values: Mapping[str, Any]) -> str:
    """A variant as a text."""
    return " ".join(f"{name}={value}" for name, value in values.items()) or "today's"


def _numbers(point: Point, batch: int) -> dict[str, Any]:
    server = point.server
    times = {}
    if server is not None and server.requests:
        times = {
            "queue_us": server.each_ns(server.queue_ns) / 1e3,
            "compute_us": server.each_ns(server.input_ns + server.infer_ns + server.output_ns) / 1e3,
            "batch_mean": server.inferences / max(server.executions, 1),
        }
    return {
        "requests": point.answered,
        "errors": dict(point.errors),
        "throughput": point.achieved_rate * batch,
        "latency_us": {name: point.latency.quantile_ns(QUANTILES[name]) / 1e3 for name in LATENCIES},
        "histogram": point.latency.to_json(),
        "gpu": gpu_numbers(point.metrics),
        "server": times,
        "client": {"cpu": point.generator.cpu_share, "late": float(point.late)},
        "verdict": str(judge(point).verdict),
    }


def _result_without_winner(sentence: str, met: bool = True) -> dict[str, Any]:
    return {"met": met, "winner": None, "gain": None, "sentence": sentence, "diff": ""}


def gpu_numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Mean utilization, and power and memory of all GPUs together, of a load's metrics by ``name:UUID``."""
    found: dict[str, list[float]] = {}
    for name, value in metrics.items():
        gauge = name.partition(":")[0]
        if gauge in _GPU:
            found.setdefault(_GPU[gauge], []).append(value)
    return {name: fmean(values) if name == "utilization" else sum(values) for name, values in found.items()}


def _nearest(file: TuneFile, limits: Sequence[Limit]) -> str:
    """Sentence on the variant that is nearest to the limits, of those measured at full length."""
    full = [one for one in file.measurements if one.window == 1 and not one.failed]
    nearest = min(full, key=lambda one: excess(one, limits))
    worst = max(limits, key=lambda limit: limit.excess(nearest))
    return f"None meets {worst}; best {worst.shown(worst.found(nearest))} at {describe(nearest.variant)}."
