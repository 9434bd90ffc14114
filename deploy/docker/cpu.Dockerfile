# Both processes on CPUs, with all versions pinned: for first runs and CI. Without arguments, it runs the demo.
#   docker build -f deploy/docker/cpu.Dockerfile -t slipstream-cpu . && docker run --rm slipstream-cpu
FROM python:3.11-slim-bookworm

# libnuma: for vLLM; gcc, g++: torch compiles kernels at runtime
# hadolint ignore=DL3008  # Debian keeps only the newest version of each
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slipstream
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY inference_server inference_server
COPY learner learner
COPY deploy deploy
RUN python deploy/cpu_environment.py install && rm -rf /root/.cache

ENV PATH=/opt/slipstream/.venv/bin:$PATH HOME=/cache USER=slipstream
RUN install -d -o 1000 /cache /runs
USER 1000
CMD ["slipstream", "colocate", "deploy/recipes/reverse.toml", "--run-dir", "/runs/demo"]
