"""Types in skops files that run no code of the file, though skops does not trust them by itself.

skops trusts estimators and what holds numbers. It makes each object with `__new__` and sets its attributes,
or finds a function by its name. So a type is harmless if it has no `__setstate__` that runs code, and a
function if it only computes with numbers: a `FunctionTransformer` can call any. Frozen distributions of
`scipy.stats` are not: they compile a text of theirs. Nor are distances by a function, `PyFuncDistance`.
"""

from __future__ import annotations

_DISTANCES = (
    *("BrayCurtis", "Canberra", "Chebyshev", "Dice", "Euclidean", "Hamming", "Haversine", "Jaccard"),
    *("Kulsinski", "Mahalanobis", "Manhattan", "Matching", "Minkowski", "RogersTanimoto", "RussellRao"),
    *("SEuclidean", "SokalMichener", "SokalSneath"),
)

_BY_MODULE: dict[str, tuple[str, ...]] = {
    # Plain containers, types of numbers, and means.
    "builtins": ("object",),
    "numpy": ("dtype", "mean"),
    # Of a function that skops checks too. Boosting of categories has one of `check_array`.
    "functools": ("partial",),
    "sklearn.utils.validation": ("check_array",),
    "scipy.sparse._csr": ("csr_matrix",),
    "sklearn.utils._bunch": ("Bunch",),
    # Nodes of trees. A file made to attack can crash the process by them, and no more.
    "sklearn.tree._tree": ("Tree",),
    "sklearn.ensemble._hist_gradient_boosting.predictor": ("TreePredictor",),
    "sklearn.ensemble._hist_gradient_boosting.binning": ("_BinMapper",),
    "sklearn.cluster._bisect_k_means": ("_BisectingTree",),
    "sklearn.cluster._kmeans": ("_kmeans_single_lloyd", "_kmeans_single_elkan"),
    # Neighbours: points in order, and distances by formula.
    "sklearn.neighbors._kd_tree": ("KDTree", "KDTree32", "KDTree64"),
    "sklearn.neighbors._ball_tree": ("BallTree", "BallTree32", "BallTree64"),
    "sklearn.metrics._dist_metrics": tuple(
        f"{name}Distance{bits}" for name in _DISTANCES for bits in (32, 64)
    ),
    # Parts of estimators that hold numbers, or other estimators that skops checks.
    "sklearn._loss.loss": ("HalfTweedieLoss", "HalfTweedieLossIdentity"),
    "sklearn.calibration": ("_CalibratedClassifier", "_SigmoidCalibration", "_TemperatureScaling"),
    "sklearn.gaussian_process._gpc": ("_BinaryGaussianProcessClassifierLaplace",),
    "sklearn.gaussian_process.kernels": (
        *("CompoundKernel", "ConstantKernel", "DotProduct", "ExpSineSquared", "Exponentiation", "Matern"),
        *("PairwiseKernel", "Product", "RBF", "RationalQuadratic", "Sum", "WhiteKernel"),
    ),
    "sklearn.multiclass": ("_ConstantPredictor",),
    "sklearn.neural_network._stochastic_optimizers": ("AdamOptimizer", "SGDOptimizer"),
    "scipy.interpolate._bsplines": ("BSpline",),
    "scipy._lib.array_api_compat.numpy._aliases": ("asarray",),
    # Selections of columns, and of features by a score.
    "sklearn.compose._column_transformer": ("make_column_selector",),
    "sklearn.feature_selection._mutual_info": ("mutual_info_classif", "mutual_info_regression"),
    "sklearn.feature_selection._univariate_selection": (
        *("chi2", "f_classif", "f_oneway", "f_regression", "r_regression"),
    ),
    # Searches keep how they split rows and scored: of no use in a prediction.
    "sklearn.model_selection._split": (
        *("GroupKFold", "GroupShuffleSplit", "KFold", "LeaveOneGroupOut", "LeaveOneOut", "LeavePGroupsOut"),
        *("LeavePOut", "PredefinedSplit", "RepeatedKFold", "RepeatedStratifiedKFold", "ShuffleSplit"),
        *("StratifiedGroupKFold", "StratifiedKFold", "StratifiedShuffleSplit", "TimeSeriesSplit"),
    ),
    "sklearn.utils._metadata_requests": ("MetadataRequest", "MethodMetadataRequest"),
    "sklearn.metrics._scorer": (
        *("_CurveScorer", "_MultimetricScorer", "_PassthroughScorer", "_Scorer"),
        *("negative_likelihood_ratio", "positive_likelihood_ratio"),
    ),
    "sklearn.metrics._classification": (
        *("accuracy_score", "balanced_accuracy_score", "brier_score_loss", "d2_brier_score"),
        *("d2_log_loss_score", "f1_score", "jaccard_score", "log_loss", "matthews_corrcoef"),
        *("precision_score", "recall_score"),
    ),
    "sklearn.metrics._ranking": ("average_precision_score", "roc_auc_score", "top_k_accuracy_score"),
    "sklearn.metrics._regression": (
        *("d2_absolute_error_score", "explained_variance_score", "max_error", "mean_absolute_error"),
        *("mean_absolute_percentage_error", "mean_gamma_deviance", "mean_poisson_deviance"),
        *("mean_squared_error", "mean_squared_log_error", "median_absolute_error", "r2_score"),
        *("root_mean_squared_error", "root_mean_squared_log_error"),
    ),
}

HARMLESS_TYPES = frozenset(f"{module}.{name}" for module, names in _BY_MODULE.items() for name in names)
"""Full names of the types and functions."""
