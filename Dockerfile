# A host like a Space: port 7860, user 1000, compiled graphs on the volume /data.
#
#   docker build -t zerogpu-demo .
#   docker run --gpus all -p 7860:7860 -v zerogpu-cache:/data zerogpu-demo
#
# Without a GPU:
#
#   docker build -t zerogpu-demo --build-arg BASE=python:3.11-slim-bookworm .
#
# pip's own settings can be passed too, such as PIP_INDEX_URL for an index with CPU builds of torch.
#
# The image has not been built where the project is developed: no container engine runs there.
# tests/test_dockerfile.py checks the steps one by one instead: what is copied exists, the package
# installs from exactly those files, its extra resolves, and the user, port, volume and command fit.
# The demo itself was run on a CPU as user 1000, with a new cache folder and this environment.

# The development image: compiling a graph for CUDA needs its headers and nvcc. Keep its CUDA version
# equal to torch's (python -c "import torch; print(torch.version.cuda)").
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Ubuntu's image already has a user 1000; torch wants any user id to have a name.
RUN (getent passwd 1000 || useradd --uid 1000 user) \
    && mkdir --parents /home/user /data \
    && chown 1000:1000 /home/user /data

ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv && pip install --no-cache-dir torch

WORKDIR /app
COPY pyproject.toml README.md ./
COPY zerogpu zerogpu
RUN pip install --no-cache-dir ".[demos]"
COPY demos demos

# OMP_WAIT_POLICY: the web server shares the cores; waiting threads that spin would slow it and them.
ENV HOME=/home/user \
    OMP_WAIT_POLICY=PASSIVE \
    GRADIO_SERVER_NAME=0.0.0.0 \
    GRADIO_SERVER_PORT=7860 \
    ZEROGPU_CACHE_DIR=/data/zerogpu
VOLUME /data
USER 1000
EXPOSE 7860
HEALTHCHECK --start-period=10m \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:7860')"]
CMD ["python", "demos/semantic_search/app.py"]
