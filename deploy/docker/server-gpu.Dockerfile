# The inference server on GPUs: Slipstream in vLLM's own image, whose torch, CUDA and kernels fit together.
#   docker build -f deploy/docker/server-gpu.Dockerfile -t slipstream-server .
FROM vllm/vllm-openai:v0.32.0

WORKDIR /opt/slipstream
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY inference_server inference_server
COPY learner learner
COPY deploy deploy
# The image already satisfies server-gpu. If it did not, this step would fail instead of replacing torch.
RUN uv pip install --system --no-cache '.[server-gpu,nccl]' --constraint deploy/docker/vllm.constraints

ENV HOME=/cache USER=slipstream
RUN install -d -o 1000 /cache /runs
USER 1000
EXPOSE 5757 8000
ENTRYPOINT ["slipstream", "serve"]
CMD ["/config/run.toml"]
