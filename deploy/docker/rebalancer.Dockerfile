# The rebalancer and the offline commands: no torch, no GPU, 0.34 GB over its base (numpy, numba, llvmlite).
#   docker build -f deploy/docker/rebalancer.Dockerfile -t evenroute/rebalancer:0.1.0 .
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY evenroute evenroute
COPY eplb eplb
COPY routing routing
COPY dist dist
COPY tools tools
RUN python -m venv /opt/evenroute \
 && /opt/evenroute/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt .

FROM python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="evenroute rebalancer" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 evenroute \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/evenroute --shell /usr/sbin/nologin evenroute \
 && install -d -o 10001 -g 10001 -m 0750 /var/lib/evenroute
COPY --from=build /opt/evenroute /opt/evenroute
# /tmp is the only other place that is written (numba's cache, ipc:// sockets): mount it where the root is read-only.
ENV PATH=/opt/evenroute/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1
USER 10001:10001
WORKDIR /var/lib/evenroute
VOLUME ["/var/lib/evenroute"]
EXPOSE 7421 9421
STOPSIGNAL SIGTERM
ENTRYPOINT ["evenroute"]
CMD ["rebalancer", "--bind", "tcp://127.0.0.1:7421", "--store", "/var/lib/evenroute/run.db"]
