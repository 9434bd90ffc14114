# The learner on GPUs. Torch includes the CUDA libraries; the host provides the driver.
#   docker build -f deploy/docker/learner-gpu.Dockerfile -t slipstream-learner .
FROM python:3.12-slim-bookworm

# gcc: triton compiles kernels at runtime
# hadolint ignore=DL3008  # Debian keeps only the newest version of each
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slipstream
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY inference_server inference_server
COPY learner learner
COPY deploy deploy
# hadolint ignore=DL3013  # pyproject.toml sets the versions
RUN pip install --no-cache-dir '.[learner,nccl]' --constraint deploy/docker/vllm.constraints

ENV HOME=/cache USER=slipstream
RUN install -d -o 1000 /cache /runs
USER 1000
ENTRYPOINT ["/opt/slipstream/deploy/train_or_resume.sh"]
CMD ["/config/run.toml", "/runs/run"]
