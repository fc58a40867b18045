# The inference service. On a GPU, Triton compiles its launchers with a C compiler and Python's headers at start-up.
#   docker build -f deploy/docker/inference.Dockerfile -t loraplex-inference .
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md ./
COPY loraplex loraplex
COPY shared shared
COPY kernels kernels
COPY inference_service inference_service
COPY registry_service/__init__.py registry_service/__init__.py
RUN python -m venv /opt/loraplex && /opt/loraplex/bin/pip install --no-cache-dir -c constraints.txt '.[inference]'

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/loraplex /opt/loraplex
ENV PATH=/opt/loraplex/bin:$PATH \
    HOME=/var/lib/loraplex \
    HF_HOME=/var/lib/loraplex/huggingface \
    TRITON_CACHE_DIR=/var/lib/loraplex/triton \
    TMPDIR=/tmp \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/loraplex
USER 65532:65532
EXPOSE 50052
ENTRYPOINT ["python", "-m", "inference_service"]
CMD ["--listen=0.0.0.0:50052"]
