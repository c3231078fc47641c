"""SageMaker's endpoints agree with the table of operations."""

from __future__ import annotations

from conch.access.principals import CONTROLS
from conch.door import operation_table as table
from conch_platforms import sagemaker_routes


def test_sagemaker_has_entries_of_its_own_with_the_same_categories() -> None:
    constants = [each for each in vars(sagemaker_routes).values() if isinstance(each, table.Endpoint)]
    assert constants == list(sagemaker_routes.ENDPOINTS)
    names = [each.name for each in (*table.ENDPOINTS, *sagemaker_routes.ENDPOINTS)]
    assert len(set(names)) == len(names)
    for each in sagemaker_routes.ENDPOINTS:
        assert each.access in table.ACCESS_CATEGORIES and each.paths
        changes = each.roles == CONTROLS
        assert changes == (each.name in ("sagemaker_load_model", "sagemaker_unload_model"))
