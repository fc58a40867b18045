# The inference service. On a GPU, Triton compiles its launchers with a C compiler and Python's headers, which this BASE
# has; the driver's library comes from the node. Build from the repository's root:
#   docker build -f deploy/docker/inference.Dockerfile -t loraplex-inference .
# A release gives BASE with its digest, as it gives the images' to kustomize.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md deploy/docker/inference.lock ./
COPY loraplex loraplex
COPY shared shared
COPY kernels kernels
COPY inference_service inference_service
COPY registry_service/__init__.py registry_service/__init__.py
RUN python -m venv /opt/loraplex \
    && /opt/loraplex/bin/pip install --no-cache-dir --require-hashes -r inference.lock \
    && /opt/loraplex/bin/pip install --no-cache-dir --no-deps --no-build-isolation -c constraints.txt '.[inference,tracing]'

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && test -f "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
COPY --from=build /opt/loraplex /opt/loraplex
ENV PATH=/opt/loraplex/bin:/usr/local/bin:/usr/bin:/bin \
    CC=gcc \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HOME=/var/lib/loraplex \
    HF_HOME=/var/lib/loraplex/huggingface \
    TRITON_CACHE_DIR=/var/lib/loraplex/cache/kernels \
    TMPDIR=/tmp \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/loraplex
USER 65532:65532
EXPOSE 50052 50054
ENTRYPOINT ["python", "-m", "inference_service"]
CMD ["--listen=0.0.0.0:50052"]
