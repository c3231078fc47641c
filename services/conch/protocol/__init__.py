# SPDX-License-Identifier: Apache-2.0
"""Wire contracts: message classes for the protocols that conch speaks.

Import the modules you need: ``inference_pb2``, ``model_config_pb2``, ``model_control_pb2``, ``health_pb2``,
``reflection_pb2`` and ``reflection_v1alpha_pb2`` behave like protoc's own output, but their messages live in
a descriptor pool of their own (``pool.POOL``), so that tritonclient, which registers some of the same names,
can share the process.
This package itself imports nothing.
"""
