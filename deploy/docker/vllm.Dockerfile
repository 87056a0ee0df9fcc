# vLLM's own image with evenroute in it, non-root; without settings it is vLLM as ever (docs/vllm.md).
#   docker build -f deploy/docker/vllm.Dockerfile -t evenroute/vllm:0.1.0 .
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0

FROM ${VLLM_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY evenroute evenroute
COPY eplb eplb
COPY routing routing
COPY dist dist
COPY tools tools
RUN python3 -m pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels .

FROM ${VLLM_IMAGE}
LABEL org.opencontainers.image.title="evenroute in vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /wheels /wheels
# torch, triton and numba are vLLM's own, in the versions that it wants.
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check /wheels/*.whl \
 && rm -r /wheels \
 && groupadd --gid 10001 evenroute \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin evenroute
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["vllm", "serve"]
CMD ["--help"]
