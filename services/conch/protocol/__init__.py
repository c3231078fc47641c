# SPDX-License-Identifier: Apache-2.0
"""Message classes of conch's protocols.

``inference_pb2``, ``model_config_pb2``, ``model_control_pb2``, ``health_pb2``, ``reflection_pb2``,
``reflection_v1alpha_pb2`` and ``orca_load_report_pb2`` behave like protoc's output, but their messages are in
a descriptor pool of their own (``pool.POOL``), so that tritonclient, which registers some of the same names,
can share the process.
"""
