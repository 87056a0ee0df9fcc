# Ranks: torch and triton over a CUDA runtime base, non-root. Put your engine on top (`FROM evenroute/rank:0.1.0`),
# or install the wheel into your engine's own image: pip install 'evenroute[rank]'.
#   docker build -f deploy/docker/rank.Dockerfile -t evenroute/rank:0.1.0 .
# "base" is the smallest of the CUDA runtime images (driver hooks and cudart): torch's wheels bring cuBLAS, cuDNN and
# NCCL with them, so the larger "runtime" would carry them twice. Keep its major version that of torch's wheels.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${CUDA_IMAGE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY evenroute evenroute
COPY eplb eplb
COPY routing routing
COPY dist dist
COPY tools tools
RUN python3 -m venv /opt/evenroute \
 && /opt/evenroute/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[rank]'

FROM ${CUDA_IMAGE}
LABEL org.opencontainers.image.title="evenroute rank" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton builds its launchers with a C compiler at the first call of a kernel.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-dev gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 evenroute \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin evenroute
COPY --from=build /opt/evenroute /opt/evenroute
ENV PATH=/opt/evenroute/bin:$PATH \
    HOME=/tmp \
    TRITON_CACHE_DIR=/tmp/triton \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
# One node, all its GPUs; a cluster's manifest gives its own torchrun line.
CMD ["torchrun", "--standalone", "--nproc-per-node", "gpu", "-m", "evenroute.tools.stress", "--routing", "zipf", "--steps", "300"]
