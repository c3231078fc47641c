"""Tree backends: `fil` as Triton has it; `xgboost`, `lightgbm` and `sklearn` with named outputs."""
