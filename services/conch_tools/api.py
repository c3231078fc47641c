"""The tools in a program: each command as a function, with its settings and its result."""

from __future__ import annotations

from conch_tools.connection import Endpoint, Tls, UrlError, parse_url
from conch_tools.infer.bulk import BulkInterrupted, BulkResult, run_bulk
from conch_tools.infer.client import CallError, InferRequest, InferResponse
from conch_tools.infer.inference import RemoteModel, infer
from conch_tools.infer.input_values import InputError
from conch_tools.infer.row_files import RowFileError, RowReader, RowWriter, open_writer
from conch_tools.infer.row_run import RowResult, RowRunError, run_rows
from conch_tools.optimize import OptimizeOptions, OptimizeResult, optimize
from conch_tools.perf.load.coordinator import LoadError
from conch_tools.perf.load.input_data import DataError
from conch_tools.perf.measure.results import Load, PerfResult
from conch_tools.perf.measuring import PerfInterrupted
from conch_tools.perf.measuring import run_perf as perf
from conch_tools.perf.perf_settings import PerfSettings, SettingError
from conch_tools.server_api import AskError
from conch_tools.top.views import GpuView, ModelView, ServerView
from conch_tools.top.watching import TopView, top
from conch_tools.tune.trial_server import TrialError
from conch_tools.tune.tune_file import FormatError, TuneFile
from conch_tools.tune.tuner import NotTunedError, TuneSettings
from conch_tools.tune.tuner import run_tune as tune

__all__ = [
    "AskError",
    "BulkInterrupted",
    "BulkResult",
    "CallError",
    "DataError",
    "Endpoint",
    "FormatError",
    "GpuView",
    "InferRequest",
    "InferResponse",
    "InputError",
    "Load",
    "LoadError",
    "ModelView",
    "NotTunedError",
    "OptimizeOptions",
    "OptimizeResult",
    "PerfInterrupted",
    "PerfResult",
    "PerfSettings",
    "RemoteModel",
    "RowFileError",
    "RowReader",
    "RowResult",
    "RowRunError",
    "RowWriter",
    "ServerView",
    "SettingError",
    "Tls",
    "TopView",
    "TrialError",
    "TuneFile",
    "TuneSettings",
    "UrlError",
    "infer",
    "open_writer",
    "optimize",
    "parse_url",
    "perf",
    "run_bulk",
    "run_rows",
    "top",
    "tune",
]
