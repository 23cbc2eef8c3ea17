# The command in a container, for a CPU:  docker build -t triforce .
# For NVIDIA's GPUs:  docker build -t triforce:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu130 --build-arg TOOLS="gcc libc6-dev" .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -e TRIFORCE_API_KEY -v triforce:/cache triforce:cuda
FROM python:3.11-slim AS build
ARG TORCH=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# For the native kernel, which chooses its instructions when it runs. The version is the distribution's.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/triforce
ENV PATH=/opt/triforce/bin:$PATH
WORKDIR /src
COPY constraints.txt .
RUN pip install --no-cache-dir --index-url "$TORCH" "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[serve,documents]"

FROM python:3.11-slim
# Triton compiles the GPU's kernels with a C compiler.
ARG TOOLS=
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$TOOLS" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $TOOLS && rm -rf /var/lib/apt/lists/*; \
    fi && useradd --uid 10001 --create-home triforce && install -d -o triforce -g triforce -m 700 /cache
COPY --from=build /opt/triforce /opt/triforce
# Models of the hub and prompts are kept in /cache.
ENV PATH=/opt/triforce/bin:$PATH TRIFORCE_HOME=/cache/triforce HF_HOME=/cache/huggingface
USER 10001
WORKDIR /home/triforce
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["triforce"]
# An address beyond this machine needs a key, in TRIFORCE_API_KEY.
CMD ["serve", "--host", "0.0.0.0"]
