"""The backend ``openvino_genai``: language models on a CPU through OpenVINO GenAI.

The server completes and checks configs without the engine; a worker runs `genai_model`.
"""
