"""The backend ``llama_cpp``: language models in GGUF files through llama.cpp, by the package xllamacpp.

The server completes and checks configs without the engine; a worker runs `llama_model`.
"""
