"""A model's input example as a warm-up sample; imports little, as each load asks for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from conch.core.spec import ModelSpec, WarmupSample
from conch_mlflow.served_files import EXAMPLE_FILE, SIGNATURE_FILE

log = logging.getLogger(__name__)


def example_samples(spec: ModelSpec) -> Iterable[WarmupSample]:
    """The sample of a version that has an example; a `SampleSource`.

    Of a model with batches it is the example's first row.
    """
    directory = spec.version_directory
    if not (directory / EXAMPLE_FILE).exists():
        return ()
    from conch.core.errors import ConchError
    from conch_mlflow.scoring.scoring_warmup import example_sample

    try:
        body = (directory / EXAMPLE_FILE).read_bytes()
        signature = (directory / SIGNATURE_FILE).read_bytes()
        return (example_sample(spec, body, signature),)
    except (ConchError, OSError, ValueError) as error:
        log.warning("the input example of MLflow model '%s' does not warm it up: %s", spec.name, error)
        return ()
