"""Types of the keywords of `conch.Server`. Made by `scripts/generate_settings.py`; do not edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict


class ServerKeywords(TypedDict, total=False):
    """Keywords of `conch.Server`, described in docs/settings.md; None leaves a setting out."""

    model_repository: Path | str | Sequence[Path | str] | None
    model_store: Path | str | Sequence[Path | str] | None
    model_name: str | None
    repository_wait_secs: float | str | None
    model_namespacing: bool | str | None
    model_cache_directory: Path | str | None
    model_cache_byte_size: int | str | None
    storage_timeout_secs: int | str | None
    storage_data_only: bool | str | None
    mlflow_allow_code: bool | str | None
    model_control_mode: Literal["none", "explicit", "poll", "watch", "on-demand"] | None
    load_model: str | Sequence[str] | None
    reload: bool | str | None
    state_directory: Path | str | None
    rollout_capture_directory: Path | str | None
    repository_poll_secs: float | str | None
    repository_settle_secs: float | str | None
    allow_model_control: bool | str | None
    allow_model_upload: bool | str | None
    model_load_thread_count: int | str | None
    model_load_retry_count: int | str | None
    max_queue_size: int | str | None
    max_model_config_size: int | str | None
    model_config_name: str | None
    disable_auto_complete_config: bool | str | None
    strict_model_config: bool | str | None
    backend_directory: Path | str | None
    repoagent_directory: Path | str | None
    backend_config: str | Sequence[str] | None
    host_policy: str | Sequence[str] | None
    id: str | None
    exit_on_error: bool | str | None
    strict_readiness: bool | str | None
    drain_delay: float | str | None
    exit_timeout_secs: int | str | None
    listen_while_loading: bool | str | None
    front_ends: str | None
    allow_client_shm: bool | str | None
    min_supported_compute_capability: float | str | None
    config_file: Path | str | None
    cache_config: str | Sequence[str] | None
    response_cache_byte_size: int | str | None
    rate_limit: Literal["off", "execution_count"] | None
    rate_limit_resource: str | Sequence[str] | None
    grpc_max_received_bytes: int | str | None
    allow_grpc: bool | str | None
    grpc_address: str | None
    grpc_port: int | str | None
    reuse_grpc_port: bool | str | None
    grpc_transport: Literal["own", "grpcio"] | None
    grpc_max_message_bytes: int | str | None
    grpc_max_connections: int | str | None
    grpc_max_concurrent_streams: int | str | None
    grpc_max_metadata_bytes: int | str | None
    grpc_min_client_rate: int | str | None
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] | None
    grpc_orca_load_reports: bool | str | None
    grpc_header_forward_pattern: str | None
    grpc_restricted_protocol: str | Sequence[str] | None
    grpc_use_ssl: bool | str | None
    grpc_use_ssl_mutual: bool | str | None
    grpc_server_cert: Path | str | None
    grpc_server_key: Path | str | None
    grpc_root_cert: Path | str | None
    grpc_keepalive_time: int | str | None
    grpc_keepalive_timeout: int | str | None
    grpc_keepalive_permit_without_calls: bool | str | None
    grpc_http2_max_pings_without_data: int | str | None
    grpc_http2_min_recv_ping_interval_without_data: int | str | None
    grpc_http2_max_ping_strikes: int | str | None
    grpc_max_connection_age: int | str | None
    grpc_max_connection_age_grace: int | str | None
    allow_http: bool | str | None
    http_address: str | None
    http_port: int | str | None
    reuse_http_port: bool | str | None
    http_thread_count: int | str | None
    http_max_input_size: int | str | None
    http_max_connections: int | str | None
    http_idle_timeout_secs: int | str | None
    http_header_forward_pattern: str | None
    http_restricted_api: str | Sequence[str] | None
    http_cors_origin: str | Sequence[str] | None
    http_use_ssl: bool | str | None
    http_server_cert: Path | str | None
    http_server_key: Path | str | None
    http_root_cert: Path | str | None
    allow_openai: bool | str | None
    openai_port: int | str | None
    openai_api_key: str | Sequence[str] | None
    openai_api_key_file: Path | str | None
    openai_restricted_api: str | Sequence[str] | None
    default_max_tokens: int | str | None
    openai_max_answers: int | str | None
    openai_store_bytes: int | str | None
    openai_tokenizer: Path | str | None
    tokenizer: Path | str | None
    chat_template: Path | str | None
    tool_call_parser: Literal["functiongemma", "gemma4", "glm", "hermes", "llama3", "mistral", "mistral_args", "qwen3_coder"] | None  # noqa: E501  # fmt: skip
    lora_separator: str | None
    frame_max_unpacked_size: int | str | None
    profile_inputs: bool | str | None
    profile_window: float | str | None
    tls_cert: Path | str | None
    tls_key: Path | str | None
    tls_client_ca: Path | str | None
    access_policy: Path | str | None
    audit_log: str | None
    control_port: int | str | None
    control_address: str | None
    control_token_file: Path | str | None
    control_use_ssl: bool | str | None
    control_server_cert: Path | str | None
    control_server_key: Path | str | None
    control_root_cert: Path | str | None
    console_port: int | str | None
    console_address: str | None
    console_host: str | Sequence[str] | None
    console_token_file: Path | str | None
    console_allow_control: bool | str | None
    console_allow_infer: bool | str | None
    console_use_ssl: bool | str | None
    console_server_cert: Path | str | None
    console_server_key: Path | str | None
    console_root_cert: Path | str | None
    access_log: str | None
    access_log_format: Literal["json", "text"] | None
    trace_config: str | Sequence[str] | None
    trace_file: str | Sequence[str] | None
    trace_level: str | Sequence[str] | None
    trace_rate: str | Sequence[str] | None
    trace_count: str | Sequence[str] | None
    trace_log_frequency: str | Sequence[str] | None
    allow_metrics: bool | str | None
    allow_gpu_metrics: bool | str | None
    allow_cpu_metrics: bool | str | None
    metrics_address: str | None
    metrics_port: int | str | None
    metrics_use_ssl: bool | str | None
    metrics_interval_ms: int | str | None
    otlp_metrics_url: str | None
    metrics_config: str | Sequence[str] | None
    resident_memory: int | str | None
    resident_gpu_memory: str | Sequence[str] | None
    resident_models: int | str | None
    cold_start: Literal["wait", "reject"] | None
    cold_start_timeout: float | str | None
    cold_queue_size: int | str | None
    cold_queue_bytes: int | str | None
    idle_timeout: float | str | None
    min_resident_secs: float | str | None
    allow_sagemaker: bool | str | None
    sagemaker_port: int | str | None
    sagemaker_safe_port_range: str | None
    sagemaker_thread_count: int | str | None
    sagemaker_default_model: str | None
    sagemaker_ping_mode: Literal["ready", "live"] | None
    sagemaker_inference_type: Literal["infer", "generate", "generate_stream", "invocations"] | None
    sagemaker_multi_model: bool | str | None
    sagemaker_session_secs: int | str | None
    allow_vertex_ai: bool | str | None
    vertex_ai_port: int | str | None
    vertex_ai_thread_count: int | str | None
    vertex_ai_default_model: str | None
    vertex_ai_predict_route: str | None
    vertex_ai_health_route: str | None
    azureml_scoring_route: str | None
    azureml_liveness_route: str | None
    azureml_readiness_route: str | None
    azureml_default_model: str | None
