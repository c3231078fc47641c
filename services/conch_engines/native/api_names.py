"""The functions of Triton's C API: what conch provides to libraries as ``libtritonserver.so``.

The C host exports all of them. A minor of an API only adds functions to those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

VERSIONS: Mapping[str, tuple[int, int]] = {
    "TRITONBACKEND": (1, 19),
    "TRITONSERVER": (1, 34),
    "TRITONCACHE": (0, 1),
    "TRITONREPOAGENT": (0, 1),
}
"""Version of each API that conch reports, by the prefix of its functions."""

# By API the functions that came with each minor, without the prefix; 0: with its first version.
_ADDED: Mapping[str, Mapping[int, str]] = {
    "TRITONBACKEND": {
        0: """
            ApiVersion BackendArtifacts BackendConfig BackendExecutionPolicy BackendMemoryManager
            BackendName BackendSetExecutionPolicy BackendSetState BackendState InputBuffer InputProperties
            MemoryManagerAllocate MemoryManagerFree ModelAutoCompleteConfig ModelBackend ModelConfig
            ModelInstanceDeviceId ModelInstanceKind ModelInstanceModel ModelInstanceName
            ModelInstanceReportBatchStatistics ModelInstanceReportStatistics ModelInstanceSetState
            ModelInstanceState ModelName ModelRepository ModelServer ModelSetConfig ModelSetState ModelState
            ModelVersion OutputBuffer RequestCorrelationId RequestId RequestInput RequestInputByIndex
            RequestInputCount RequestInputName RequestOutputCount RequestOutputName RequestRelease
            ResponseDelete ResponseFactoryDelete ResponseFactoryNew ResponseFactorySendFlags ResponseNew
            ResponseNewFromFactory ResponseOutput ResponseSend ResponseSetBoolParameter
            ResponseSetIntParameter ResponseSetStringParameter
        """,
        1: "ModelInstanceIsPassive",
        2: "ModelInstanceProfileCount ModelInstanceProfileName",
        3: "ModelInstanceHostPolicy",
        4: "InputBufferForHostPolicy InputPropertiesForHostPolicy",
        5: "ModelInstanceSecondaryDeviceCount ModelInstanceSecondaryDeviceProperties",
        6: "RequestCorrelationIdString StateBuffer StateNew StateUpdate",
        7: "RequestOutputBufferProperties",
        8: "RequestFlags",
        9: "InputBufferAttributes OutputBufferAttributes StateBufferAttributes",
        10: "BackendAttributeAddPreferredInstanceGroup",
        12: "RequestParameter RequestParameterCount",
        13: "ModelInstanceReportMemoryUsage ModelReportMemoryUsage",
        14: "BackendAttributeSetParallelModelInstanceLoading",
        15: "RequestTrace",
        16: """
            InferenceResponseOutput InferenceResponseOutputByName RequestIsCancelled
            ResponseFactoryIsCancelled
        """,
        17: "InferenceRequestTimeoutMicroseconds",
        18: "ResponseSetDoubleParameter",
        19: """
            ModelInstanceReportResponseStatistics ModelInstanceResponseStatisticsDelete
            ModelInstanceResponseStatisticsNew ModelInstanceResponseStatisticsSetComputeOutputStart
            ModelInstanceResponseStatisticsSetError ModelInstanceResponseStatisticsSetModelInstance
            ModelInstanceResponseStatisticsSetResponseEnd ModelInstanceResponseStatisticsSetResponseFactory
            ModelInstanceResponseStatisticsSetResponseStart
        """,
    },
    "TRITONSERVER": {
        0: """
            ApiVersion DataTypeByteSize DataTypeString ErrorCode ErrorCodeString ErrorDelete ErrorMessage
            ErrorNew InferenceRequestAddInput InferenceRequestAddRequestedOutput
            InferenceRequestAppendInputData InferenceRequestCorrelationId InferenceRequestDelete
            InferenceRequestFlags InferenceRequestId InferenceRequestNew InferenceRequestPriority
            InferenceRequestRemoveAllInputData InferenceRequestRemoveAllInputs
            InferenceRequestRemoveAllRequestedOutputs InferenceRequestRemoveInput
            InferenceRequestRemoveRequestedOutput InferenceRequestSetCorrelationId InferenceRequestSetFlags
            InferenceRequestSetId InferenceRequestSetPriority InferenceRequestSetReleaseCallback
            InferenceRequestSetResponseCallback InferenceRequestSetTimeoutMicroseconds
            InferenceRequestTimeoutMicroseconds InferenceResponseDelete InferenceResponseError
            InferenceResponseId InferenceResponseModel InferenceResponseOutput
            InferenceResponseOutputClassificationLabel InferenceResponseOutputCount
            InferenceResponseParameter InferenceResponseParameterCount InferenceTraceActivityString
            InferenceTraceDelete InferenceTraceId InferenceTraceLevelString InferenceTraceModelName
            InferenceTraceModelVersion InferenceTraceNew InferenceTraceParentId InstanceGroupKindString
            LogIsEnabled LogMessage MemoryTypeString MessageDelete MessageNewFromSerializedJson
            MessageSerializeToJson MetricsDelete MetricsFormatted ParameterTypeString
            ResponseAllocatorDelete ResponseAllocatorNew ServerDelete ServerInferAsync ServerIsLive
            ServerIsReady ServerLoadModel ServerMetadata ServerMetrics ServerModelBatchProperties
            ServerModelConfig ServerModelIndex ServerModelIsReady ServerModelMetadata ServerModelStatistics
            ServerModelTransactionProperties ServerNew ServerOptionsDelete ServerOptionsNew
            ServerOptionsSetBackendConfig ServerOptionsSetBackendDirectory
            ServerOptionsSetBufferManagerThreadCount ServerOptionsSetCudaMemoryPoolByteSize
            ServerOptionsSetExitOnError ServerOptionsSetExitTimeout ServerOptionsSetGpuMetrics
            ServerOptionsSetLogError ServerOptionsSetLogInfo ServerOptionsSetLogVerbose
            ServerOptionsSetLogWarn ServerOptionsSetMetrics ServerOptionsSetMinSupportedComputeCapability
            ServerOptionsSetModelControlMode ServerOptionsSetModelRepositoryPath
            ServerOptionsSetPinnedMemoryPoolByteSize ServerOptionsSetRepoAgentDirectory
            ServerOptionsSetServerId ServerOptionsSetStartupModel ServerOptionsSetStrictModelConfig
            ServerOptionsSetStrictReadiness ServerPollModelRepository ServerStop ServerUnloadModel
            StringToDataType
        """,
        1: "ServerUnloadModelAndDependents",
        2: "ServerOptionsSetHostPolicy",
        3: """
            InferenceRequestAppendInputDataWithHostPolicy ServerOptionsAddRateLimiterResource
            ServerOptionsSetRateLimiterMode
        """,
        4: """
            InferenceRequestCorrelationIdString InferenceRequestSetCorrelationIdString
            ServerOptionsSetMetricsInterval
        """,
        5: "ServerOptionsSetResponseCacheByteSize",
        6: "ResponseAllocatorSetQueryFunction",
        7: "InferenceTraceTensorNew",
        8: "ParameterDelete ParameterNew ServerLoadModelWithParameters",
        9: """
            BufferAttributesByteSize BufferAttributesCudaIpcHandle BufferAttributesDelete
            BufferAttributesMemoryType BufferAttributesMemoryTypeId BufferAttributesNew
            BufferAttributesSetByteSize BufferAttributesSetCudaIpcHandle BufferAttributesSetMemoryType
            BufferAttributesSetMemoryTypeId InferenceRequestAppendInputDataWithBufferAttributes
            ResponseAllocatorSetBufferAttributesFunction
        """,
        10: "InferenceRequestAddRawInput",
        11: """
            GetMetricKind MetricDelete MetricFamilyDelete MetricFamilyNew MetricIncrement MetricNew
            MetricSet MetricValue ServerRegisterModelRepository ServerUnregisterModelRepository
        """,
        13: "ParameterBytesNew",
        14: "ServerOptionsSetLogFormat",
        15: "ServerOptionsSetModelLoadThreadCount",
        16: "ServerOptionsSetLogFile ServerOptionsSetModelLoadDeviceLimit",
        17: "ServerOptionsSetCpuMetrics",
        18: "ServerOptionsSetModelNamespacing",
        19: "InferenceTraceRequestId",
        20: "ServerOptionsSetCacheConfig ServerOptionsSetCacheDirectory",
        21: """
            InferenceRequestSetBoolParameter InferenceRequestSetIntParameter
            InferenceRequestSetStringParameter
        """,
        22: "ServerOptionsSetMetricsConfig",
        23: "InferenceRequestPriorityUInt64 InferenceRequestSetPriorityUInt64",
        24: "InferenceTraceSpawnChildTrace",
        25: "InferenceRequestCancel InferenceRequestIsCancelled",
        27: "ServerOptionsSetCudaVirtualAddressSize",
        28: "InferenceRequestSetDoubleParameter ServerOptionsSetModelLoadRetryCount",
        29: "InferenceTraceContext InferenceTraceSetContext",
        30: "ServerSetExitTimeout",
        31: "ServerOptionsSetEnablePeerAccess ServerOptionsSetModelConfigName",
        33: "InferenceTraceReportActivity",
        34: """
            GetMetricFamilyKind MetricArgsDelete MetricArgsNew MetricArgsSetHistogram MetricNewWithArgs
            MetricObserve
        """,
    },
    "TRITONCACHE": {
        0: """
            ApiVersion CacheEntryAddBuffer CacheEntryBufferCount CacheEntryGetBuffer CacheEntrySetBuffer
            Copy
        """,
    },
    "TRITONREPOAGENT": {
        0: """
            ApiVersion ModelConfig ModelParameter ModelParameterCount ModelRepositoryLocation
            ModelRepositoryLocationAcquire ModelRepositoryLocationRelease ModelRepositoryUpdate
            ModelSetState ModelState SetState State
        """,
    },
}

SINCE: Mapping[str, int] = {
    f"{api}_{name}": minor
    for api, added in _ADDED.items()
    for minor, names in added.items()
    for name in names.split()
}
"""Minor version of its API that each function came with, by the function's whole name."""


def api_of(name: str) -> str:
    """Prefix of the API that a function belongs to by its name; empty if to none."""
    prefix = name.partition("_")[0]
    return prefix if prefix in VERSIONS else ""


def least_minors(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Least minor of each API that has the functions, and one that came with it; skips unknown functions."""
    least: dict[str, tuple[int, str]] = {}
    for name in sorted(names):
        minor = SINCE.get(name)
        if minor is not None and minor > least.get(api_of(name), (-1, ""))[0]:
            least[api_of(name)] = (minor, name)
    return least
