# kvrelay with everything that a router, a controller and a Ray node need, from the versions in requirements/*.lock.
#   docker build --build-arg TORCH_INDEX=URL -t kvrelay:0.1.0 .       URL: PyTorch's index of builds for CPUs
#   docker build --build-arg TORCH=cuda -t kvrelay:0.1.0-cuda .
FROM python:3.11-slim AS build

RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv --without-pip /opt/kvrelay
WORKDIR /src

ARG TORCH=cpu
ARG TORCH_INDEX=
COPY requirements/build.lock requirements/${TORCH}.lock requirements/
RUN pip install --no-cache-dir --require-hashes -r requirements/build.lock
RUN pip --python /opt/kvrelay/bin/python install --no-cache-dir --require-hashes --only-binary :all: \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/${TORCH}.lock

COPY pyproject.toml README.md LICENSE ./
COPY kvrelay kvrelay
COPY kv_transfer kv_transfer
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY router router
COPY autoscaler autoscaler
RUN pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/kvrelay/bin/python install --no-deps dist/*.whl
# For each kind of processor, since it is not known which the nodes have.
COPY scripts/prebuild_kernels.py scripts/
RUN /opt/kvrelay/bin/python scripts/prebuild_kernels.py /opt/kvrelay/kernels

FROM python:3.11-slim

# libgomp1: threads of the CPU kernels. wget: what KubeRay's and our own probes run.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 wget && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --no-create-home kvrelay
COPY --from=build /opt/kvrelay /opt/kvrelay
COPY k8s/leave-node /usr/local/bin/leave-node
# Of the file system only /tmp is there to be written to.
ENV PATH=/opt/kvrelay/bin:$PATH KVRELAY_KERNELS=/opt/kvrelay/kernels HOME=/tmp XDG_CACHE_HOME=/tmp/cache
WORKDIR /tmp
USER 1000
CMD ["kvrelay", "--help"]
