# Built by `make image PROFILE=cpu` or `PROFILE=gpu`, which fill in the labels. Not built in CI: no engine there.
# The base is pinned by version; pin it by digest too as soon as a registry can be reached.
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS build
ARG PROFILE=cpu
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY . .
# uv and pip go once they have done their work. The test tools stay: an image is accepted by running its tests in it.
# Compiled now: on a cluster the file system of a container is read-only, and every process would compile torch anew.
RUN UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 PIP_NO_CACHE_DIR=1 PYTHON=/usr/local/bin/python3.12 scripts/install.sh \
    && .venv/bin/uv pip uninstall --python .venv/bin/python pip uv \
    && .venv/bin/python -m compileall -q checkpointing chaos trainer harness

FROM ${BASE}
ARG PROFILE=cpu
ARG VERSION=unknown
ARG COMMIT=
ARG LOCK_SHA256=unknown
LABEL org.opencontainers.image.title="fault-tolerant-rl-harness" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}" \
      harness.profile="${PROFILE}" \
      harness.lock.sha256="${LOCK_SHA256}"
# libnuma: vLLM's CPU build. openssl: KubeRay waits with it for a pod's certificate. gcc: Triton compiles its kernels'
# launchers when they first run, on GPUs only.
# flash-attn is not in the lock: its 2.8.3 needs a CUDA toolchain or a wheel of your own, added in an image on top of this.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 openssl $(test "$PROFILE" = gpu && echo gcc libc6-dev) \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 harness \
    && useradd --create-home --uid 10001 --gid 10001 harness \
    && install --directory --owner harness /app /app/runs
COPY --from=build /app /app
# By number: Kubernetes can't tell of a name whether it is root.
USER 10001:10001
WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HARNESS_COMMIT=${COMMIT}
VOLUME /app/runs
ENTRYPOINT ["harness"]
CMD ["--help"]
