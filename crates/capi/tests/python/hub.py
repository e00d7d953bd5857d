"""For pytest (`-p hub`): models that llama-cpp-python's tests would download are files at hand: the one that
RECURRENT names for those of Mamba, MODEL for others.
"""

import os

import huggingface_hub


def file(repository, *_arguments, **_options):
    return os.environ["RECURRENT" if "mamba" in repository else "MODEL"]


huggingface_hub.hf_hub_download = file
