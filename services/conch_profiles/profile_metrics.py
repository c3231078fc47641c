"""The metric families of input profiles."""

from __future__ import annotations

from conch.core.registry import Registry
from conch.observability.metrics.metric_families import Family, model_labels, sample
from conch.observability.metrics.server_metrics import Found
from conch_profiles.profiled_model import profile_of

_REQUESTS = Family(
    "conch_profile_requests_total", "counter", "Requests whose inputs the profile of a version has counted"
)
_ROWS = Family("conch_profile_rows_total", "counter", "Rows of these requests that it has counted")
_NULLS = Family("conch_profile_null_ratio", "gauge", "Share of nulls in a column of the inputs [0.0 - 1.0]")
_PSI = Family(
    "conch_profile_psi",
    "gauge",
    "Population stability index of a column of the inputs against the training set; without drift near 0",
)
_NEW = Family(
    "conch_profile_new_ratio",
    "gauge",
    "Share of values in a column of the inputs whose category the training set has not [0.0 - 1.0]",
)


def profile_families(registry: Registry) -> Found:
    """The families, for versions that are profiled."""
    requests, rows, nulls, psi, new = [], [], [], [], []
    for identifier, entry in sorted(registry.entries.items()):
        for version, model in sorted(entry.ready.items()):
            profile = profile_of(model)
            if profile is None:
                continue
            own = {**model_labels(*registry.name_and_namespace(identifier)), "version": str(version)}
            requests.append(sample(_REQUESTS.name, profile.requests, own))
            rows.append(sample(_ROWS.name, profile.rows, own))
            for each in profile.figures():
                labels = {**own, "column": each.name}
                nulls.append(sample(_NULLS.name, each.nulls, labels))
                if each.psi is not None:
                    psi.append(sample(_PSI.name, each.psi, labels))
                if each.new is not None:
                    new.append(sample(_NEW.name, each.new, labels))
    if not requests:
        return []
    return [(_REQUESTS, requests), (_ROWS, rows), (_NULLS, nulls), (_PSI, psi), (_NEW, new)]
