# The image of routers, controllers and Ray nodes, with the packages of requirements/*.lock.
#   docker build -t kvrelay:0.1.0 .
#   docker build --build-arg TORCH=cuda -t kvrelay:0.1.0-cuda .   # with vLLM, for GPUs
# Each stage depends only on the files that it copies. After a change of Python code, the build
# reuses the dependencies and the kernels and replaces only the last, small layers of the image.
FROM python:3.11-slim-trixie AS dependencies

WORKDIR /src
RUN python -m venv --without-pip /opt/kvrelay
ARG TORCH=cpu
# PyTorch's package index with CPU builds, or a mirror. PyPI has only CUDA builds.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/${TORCH}.lock requirements/
# --no-deps: the lock is complete, and has the newer of the two releases of llguidance that vLLM and
# kvrelay ask for.
RUN pip --python /opt/kvrelay/bin/python install --no-cache-dir --no-deps --require-hashes \
    --only-binary :all: ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/${TORCH}.lock

FROM python:3.11-slim-trixie AS kernels

RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY scripts/prebuild_kernels.py scripts/
COPY kvrelay/compiler kvrelay/compiler
COPY kvrelay/engine/native/kernels kvrelay/engine/native/kernels
COPY kv_transfer/kernels kv_transfer/kernels
# Compiles the kernels for each processor type, because the build does not know the nodes.
RUN PYTHONPATH=. python scripts/prebuild_kernels.py /opt/kernels

FROM dependencies AS application

COPY requirements/build.lock requirements/
RUN pip install --no-cache-dir --require-hashes -r requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY kvrelay kvrelay
COPY kv_transfer kv_transfer
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY router router
COPY autoscaler autoscaler
RUN pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/kvrelay/bin/python install --no-deps --prefix /opt/application dist/*.whl

FROM python:3.11-slim-trixie

LABEL org.opencontainers.image.title="kvrelay" \
    org.opencontainers.image.description="Disaggregated prefill/decode serving cluster for large language models" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0"
ARG TORCH=cpu
# libgomp1: threads of the CPU kernels. wget: probes of KubeRay, k8s/ and compose.yaml. gcc: for
# Triton, which compiles the launchers of vLLM's kernels when they first run.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 wget \
    $([ "$TORCH" = cpu ] || echo gcc libc6-dev) \
    && rm -rf /var/lib/apt/lists/* && useradd --uid 1000 --no-create-home kvrelay
COPY --from=dependencies /opt/kvrelay /opt/kvrelay
COPY --from=kernels /opt/kernels /opt/kvrelay/kernels
COPY --from=application /opt/application /opt/kvrelay
COPY k8s/leave-node /usr/local/bin/leave-node
# kvrelay writes only to /tmp and /dev/shm, so the root file system may be read-only.
ENV PATH=/opt/kvrelay/bin:$PATH KVRELAY_KERNELS=/opt/kvrelay/kernels HOME=/tmp XDG_CACHE_HOME=/tmp/cache
WORKDIR /tmp
USER 1000:1000
EXPOSE 8000 50051
# There is no HEALTHCHECK, because the probe depends on the command. compose.yaml and k8s/ define
# probes for each component.
CMD ["kvrelay", "--help"]
