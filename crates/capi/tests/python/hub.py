"""For pytest (`-p hub`): models that llama-cpp-python's tests would download are the file that MODEL names."""

import os

import huggingface_hub

huggingface_hub.hf_hub_download = lambda *_arguments, **_options: os.environ["MODEL"]
