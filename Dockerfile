# kvrelay with everything that a router, a controller and a Ray node need. Not built in this repository's tests.
#   docker build -t kvrelay:0.1.0 .
FROM python:3.11-slim

# wget is what KubeRay's and our own probes run; g++ compiles the CPU kernels for the node that a worker starts on.
RUN apt-get update && apt-get install -y --no-install-recommends g++ wget && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home kvrelay

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvrelay kvrelay
COPY kv_transfer kv_transfer
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY router router
COPY autoscaler autoscaler

# Torch without CUDA unless told otherwise; for GPUs build with https://download.pytorch.org/whl/cu130, say.
# ray[default] brings the agent that answers KubeRay's probes. All nodes of a Ray cluster need the same Ray and Python.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" '.[cluster]' 'ray[default]==2.60.0'

WORKDIR /home/kvrelay
USER 1000
CMD ["kvrelay", "--help"]
