"""`slipstream doctor`: checks from the learner's side that a run can start. Each problem has a remedy.

    each server: names ─▶ port ─▶ keys ─▶ Probe, ServerInfo ─▶ versions, model, clock, transport
        ─▶ evaluation, memory, disk ─▶ each server that answered: Trial ─▶ bandwidth

The doctor also works with a server that serves a run, and changes nothing.
A server that cannot be reached gets no further checks.
The needs of memory and disk are estimated without loading the model.
"""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress

import msgspec
import torch

from learner.config import LearnerRun, WeightSyncConfig
from learner.doctor.reach import ANSWER_TIMEOUT_S, NotReached, answer, ask, check_names, check_port
from learner.evaluation.openai_client import EvaluationError, open_client
from learner.policy.memory import GIB, describe
from learner.policy.memory_plan import Room, fastest_plan, make_plan
from learner.policy.model import load_config
from learner.policy.model_shape import shape_of
from learner.servers.membership import EndpointSource
from learner.servers.parity import DTYPES, coarser
from protocol.channel.keys import learner_keys
from protocol.channel.sockets import LearnerChannel
from protocol.config_keys import explain
from protocol.console import counted
from protocol.doctor import (
    Finding,
    disk_finding,
    dtype_finding,
    free_memory_bytes,
    in_one_line,
    ok,
    package_version,
    problem,
    problem_of,
    unknown,
)
from protocol.errors import ConfigError, HandshakeRefused, PushError
from protocol.messages import PROTOCOL_VERSION, ModelFingerprint, ServerInfo, Trial, TrialResult
from protocol.model_files import fingerprint, local_model, weight_bytes
from protocol.transports.collective import load_transport
from protocol.transports.group import RendezvousHost, address_towards
from protocol.transports.registry import TRANSPORTS
from protocol.transports.transport import (
    choose_transport,
    find_offer,
    offered_transports,
    own_device_name,
    why_over_cpus,
)
from protocol.transports.trial import MAX_TRIAL_S, send_trial

MAX_CLOCK_OFFSET_S = 5.0
EVALUATION_TIMEOUT_S = 3.0
TRIAL_BYTES = 64 << 20
MIB = 1 << 20


class Placement(msgspec.Struct, frozen=True):
    """The learner's part of [deploy], whose other keys only the deploy package reads."""

    learner_gpus: tuple[int, ...] = ()
    learner_cores: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, run: LearnerRun) -> "Placement":
        """Return the part of a run. Raises ConfigError if a key has another type."""
        try:
            return msgspec.convert(run.deploy, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"deploy.{explain(str(error), run.deploy, cls)}; use a list") from error

    @property
    def gpus(self) -> list[int]:
        """GPUs of the learner that this process sees, or the first. Empty if it sees none."""
        seen = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        return [gpu for gpu in self.learner_gpus if gpu in seen] or [*seen[:1]]

    @property
    def num_ranks(self) -> int:
        return max(1, len(self.learner_gpus), len(self.learner_cores))


def examine(run: LearnerRun) -> Iterator[Finding]:
    """Yield the findings of all checks: servers, evaluation, dtype, memory and disk, and last the trials."""
    try:
        Placement.of(run)
    except ConfigError as error:
        yield problem_of("deploy", error, "use a list")
        return
    try:
        endpoints = servers_now(run)
    except ConfigError as error:
        endpoints = ()
        yield problem_of("servers", error, "set `endpoints_from` to a source that lists the servers")
    with asyncio.Runner() as runner:
        examined = [
            ("" if len(endpoints) == 1 else f"{endpoint}: ", examine_server(run, endpoint)) for endpoint in endpoints
        ]
        reference = run.learner.in_effect().reference
        if reference.endpoint is not None:
            findings = examine_server(run, reference.endpoint, only_scores=not reference.is_synced)
            examined.append((f"the reference at {reference.endpoint}: ", findings))
        for server, findings in examined:
            yield from _until("transport", runner, server, findings)
        if run.learner.evaluation.every_steps:
            yield runner.run(check_evaluation(run.evaluation_url))
        yield dtype_finding(run.dtype)
        yield from check_resources(run)
        for server, findings in examined:  # a trial takes seconds
            yield from _until("bandwidth", runner, server, findings)


def servers_now(run: LearnerRun) -> tuple[str, ...]:
    """Return the endpoints of the run. Raises ConfigError."""
    if run.endpoints_from is None:
        return run.servers
    return EndpointSource(run.endpoints_from, has_keys=run.keys is not None, insecure=run.insecure).endpoints


def _until(last: str, runner: asyncio.Runner, server: str, findings: AsyncIterator[Finding]) -> Iterator[Finding]:
    """Yield the findings about a server up to the one about `last`."""
    while (finding := runner.run(_next(findings))) is not None:
        yield msgspec.structs.replace(finding, text=f"{server}{finding.text}")
        if finding.subject == last:
            return


async def _next(findings: AsyncIterator[Finding]) -> Finding | None:
    return await anext(findings, None)


async def examine_server(run: LearnerRun, endpoint: str, *, only_scores: bool = False) -> AsyncIterator[Finding]:
    """Check one server, as far as it can be reached. `only_scores`: it holds a frozen reference."""
    found = check_names(endpoint)
    yield found
    if found.verdict == "problem":
        return
    found = check_port(endpoint)
    yield found
    if found.verdict == "problem":
        return
    try:
        keys = learner_keys(run.keys) if run.keys is not None else None
    except ConfigError as error:
        yield problem_of("keys", error, "make keys with `slipstream keys keys`, or copy them here with `scp -p`")
        return
    with closing(LearnerChannel(endpoint, keys, insecure=run.insecure)) as channel:
        try:
            server_info, offset_s, slack_s = await ask(channel, keys)
        except HandshakeRefused as error:
            yield problem_of("keys", error, "use the same keys on both sides")
            return
        except NotReached as reason:
            yield reason.finding
            return
        yield ok("keys", f"{endpoint} accepts this learner's key" if keys else "none on either side")
        for finding in (
            check_versions(server_info), check_tenancy(server_info.run),
            check_model(server_info.model, run.model, only_scores=only_scores),
            check_dtype(run, server_info.dtype, server_info.quantization),
            check_clock(offset_s, slack_s),
        ):  # fmt: skip
            yield finding
        if only_scores:
            return
        found = check_transport(run, server_info)
        yield found
        if found.verdict != "problem":
            yield await check_bandwidth(run, channel)


async def check_evaluation(url: str) -> Finding:
    """Check that an HTTP server answers for the run's evaluations."""
    try:
        async with open_client(url, EVALUATION_TIMEOUT_S) as client:
            return ok("evaluation", f"{url} serves {(await client.model_served()).name}")
    except EvaluationError as error:
        return problem_of(
            "evaluation", error, "start the server with server.http_port, or correct learner.evaluation.url"
        )


def check_tenancy(served: str | None) -> Finding:
    """Report the run that the server serves, if any."""
    if served is None:
        return ok("tenancy", "the server is free")
    return ok("tenancy", f"the server serves run {served}; another run waits until it ends (learner.connect_timeout_s)")


def check_versions(server_info: ServerInfo) -> Finding:
    theirs, ours = (server_info.protocol_version, server_info.package_version), (PROTOCOL_VERSION, package_version())
    text = f"slipstream-rl {theirs[1]} (protocol {theirs[0]}) at the server, {ours[1]} (protocol {ours[0]}) here"
    return (
        ok("versions", text) if theirs == ours else problem("versions", text, "install the same version on both sides")
    )


def check_model(theirs: ModelFingerprint, name: str, *, only_scores: bool = False) -> Finding:
    """Check that both sides have the same model, or for a frozen reference tokenizer, as the handshake does."""
    try:
        path = local_model(name)
        if path is None:
            return unknown("model", f"{name} is not on this machine yet; the run will download it")
        ours = fingerprint(path)
    except ConfigError as error:
        return problem_of("model", error, "set `model` to one that both sides have")
    differ = [
        f"{field} {getattr(theirs, field)} at the server, {getattr(ours, field)} here"
        for field in (("tokenizer_hash",) if only_scores else theirs.__struct_fields__)
        if getattr(theirs, field) != getattr(ours, field)
    ]
    if only_scores and theirs.vocab_size < ours.vocab_size:
        differ.append(f"vocab_size {theirs.vocab_size} at the server, at least {ours.vocab_size} needed")
    if differ:
        return problem("model", f"the models differ: {'; '.join(differ)}", "start both sides with the same `model`")
    if only_scores:
        return ok("model", f"a {theirs.architecture} of {theirs.size} with the same tokenizer")
    return ok("model", f"the same {theirs.architecture} of {theirs.size} on both sides")


def check_dtype(run: LearnerRun, theirs: str, quantization: str = "") -> Finding:
    """Compare the dtypes and report the parity bound if they differ."""
    if theirs == run.dtype and not quantization:
        return ok("dtype", f"{theirs} on both sides")
    text = f"{theirs}{quantization and f' ({quantization})'} at the server, {run.dtype} here"
    if theirs not in DTYPES:
        return problem(
            "dtype", text, f"set server.dtype to one of {', '.join(DTYPES)}, or remove it, and restart the server"
        )
    bound = run.learner.parity.bound("quantized" if quantization else coarser(theirs, run.dtype))
    return ok("dtype", f"{text}: the parity check accepts a mean |Δ logprob| of up to {bound:.2g}")


def check_clock(offset_s: float, slack_s: float) -> Finding:
    """Check the server's clock, which is `offset_s` ahead, give or take `slack_s`."""
    text = f"the server's clock is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} this machine's"
    if abs(offset_s) - slack_s > MAX_CLOCK_OFFSET_S:
        remedy = "synchronize both with NTP (`timedatectl set-ntp true`), so that logs and reports of both are in order"
        return problem("clock", text, remedy)
    return ok("clock", f"{text}, to within {slack_s:.1g} s")


def check_transport(run: LearnerRun, server_info: ServerInfo) -> Finding:
    """Report the transport that a weight sync would choose."""
    gpus = Placement.of(run).gpus
    device = torch.device("cuda", gpus[0]) if gpus else torch.device("cpu")
    wanted, own_device, offered = run.learner.weight_sync.transport, own_device_name(device), offered_transports()
    try:
        chosen = choose_transport(
            wanted,
            own_device,
            server_info.devices,
            learner_transports=offered,
            server_transports=server_info.transports,
        )
    except (ConfigError, PushError) as error:
        return problem_of("transport", error, 'set learner.weight_sync.transport = "tcp"')
    devices = [own_device, *server_info.devices]
    detour = why_over_cpus(devices, {"learner": offered, "server": server_info.transports})
    if wanted == "auto" and detour is not None:
        absent = [load_transport(name) for name in TRANSPORTS if find_offer(name, offered) is None]
        reasons = (it.why_not_here() for it in absent if it.obstacle(devices, is_explicit=False) is None)
        remedy = next(filter(None, reasons), "run `slipstream doctor --server` on the server's machine")
        text = f"weights are sent with {chosen}, over the CPUs: {detour}"
        return problem("transport", text, f'{remedy}, or accept it: learner.weight_sync.transport = "{chosen}"')
    return ok("transport", f"weights are sent with {chosen} to {len(server_info.devices)} worker(s)")


async def check_bandwidth(run: LearnerRun, channel: LearnerChannel) -> Finding:
    """Send trial bytes as a weight sync between CPUs would.

    With a transport that stays on the GPUs, tcp carries them. Its one port is the learner's.
    """
    push = run.learner.weight_sync
    try:
        own_host = address_towards(channel.endpoint)
    except PushError as error:
        return problem_of("bandwidth", error, "use another address of the server as its endpoint")
    timeout_s = min(push.timeout_s, MAX_TRIAL_S)
    chosen = TRANSPORTS.get(push.transport)
    by = "tcp" if chosen is None or load_transport(push.transport).between_gpus else push.transport
    try:
        rendezvous_host = RendezvousHost(own_host, timeout_s, ports=push.port_range(), advertise=push.advertise)
    except PushError as error:
        return problem_of(
            "bandwidth", error, "stop the run that uses the ports, or add ports to learner.weight_sync.ports"
        )
    remedy = (
        f"allow connections from the server's machine to {rendezvous_host.advertised} on port {push.ports or 'any'} "
        "(learner.weight_sync.ports, learner.weight_sync.advertise) in the firewalls"
    )
    if chosen is not None and not chosen.uses_one_port:
        remedy = f"allow TCP between {own_host} and the server in the firewalls, on all ports and in both directions"
    with closing(rendezvous_host):
        trial = Trial(trial_id=uuid.uuid4().hex, rendezvous=rendezvous_host.rendezvous(1, by), num_bytes=TRIAL_BYTES)
        await channel.send(trial, ANSWER_TIMEOUT_S)
        sending = asyncio.create_task(asyncio.to_thread(send_trial, rendezvous_host, trial))
        try:
            ended = await answer(channel, TrialResult, 3 * timeout_s)
        except NotReached as reason:
            return problem("bandwidth", f"the test transfer did not finish: {reason.finding.text}", remedy)
        finally:
            rendezvous_host.cancel(trial.trial_id, "the doctor's test transfer is over")
            with suppress(PushError):  # the server has reported the error
                (await sending).close()
    if ended.error is not None:
        return problem("bandwidth", f"weights cannot be sent: {in_one_line(ended.error)}", remedy)
    found = fast_enough(TRIAL_BYTES / max(ended.receive_s, 1e-6), sync_bytes(run), push)
    return msgspec.structs.replace(found, text=f"{found.text}; workers connect to {rendezvous_host.advertised}")


def fast_enough(rate: float, num_bytes: int | None, push: WeightSyncConfig) -> Finding:
    """Check that a bucket arrives within the timeout at `rate` bytes/s.

    A model of `num_bytes` may be smaller than a bucket.
    """
    bucket = push.bucket_mib * MIB if num_bytes is None else min(push.bucket_mib * MIB, num_bytes)
    text = f"{rate / MIB:,.0f} MiB/s to the server over TCP"
    if bucket / rate > push.timeout_s:
        remedy = (
            f"lower learner.weight_sync.bucket_mib ({push.bucket_mib}) or raise learner.weight_sync.timeout_s "
            f"({push.timeout_s:g})"
        )
        return problem("bandwidth", f"{text}, too slow to send a bucket before a weight sync times out", remedy)
    return ok("bandwidth", text)


def sync_bytes(run: LearnerRun) -> int | None:
    """Return the size of the weights, or None if the model is not on this machine yet."""
    path = local_model(run.model)
    return None if path is None else weight_bytes(path, run.dtype)


def check_resources(run: LearnerRun) -> Iterator[Finding]:
    """Check memory and disk for the ranks that `deploy` places on this node, or for one.

    docs/memory-formulas.md has the formulas.
    """
    try:
        path = local_model(run.model)
        if path is None:
            yield unknown("memory", f"cannot estimate the needs of {run.model} until it is on this machine")
            return
        shape = shape_of(load_config(path))
    except Exception as error:  # transformers may raise anything for a config
        yield unknown("memory", f"cannot estimate the needs of {run.model} ({error})")
        return
    room = _room(run)
    plan = fastest_plan(shape, run, room)
    try:
        plan = make_plan(shape, run, room)
    except ConfigError as error:
        yield problem_of("memory", error, "choose one of these changes")
    else:
        yield ok("memory", f"the learner needs about {describe(plan.memory)} with {plan}")
    checkpoints = run.learner.checkpoint
    num_written = math.ceil(run.learner.steps / checkpoints.every_steps)
    # With the one that is being written. 0: all are kept.
    num_kept = checkpoints.keep_last + 1 if checkpoints.keep_last else num_written
    needed = num_kept * plan.memory.host["checkpoint"]
    yield disk_finding(run.checkpoint_dir, counted(num_kept, "checkpoint"), needed)


def _room(run: LearnerRun) -> Room:
    """Return the least memory that a GPU of the learner has free now.

    A server that uses the same GPU may not have started yet.
    """
    placement = Placement.of(run)
    memory = [torch.cuda.mem_get_info(gpu) for gpu in placement.gpus]
    free, total = map(min, zip(*memory, strict=True)) if memory else (0, 0)
    return Room(
        device_gib=free / GIB,
        device_total_gib=total / GIB,
        host_gib=free_memory_bytes() / GIB,
        device_type="cuda" if memory else "cpu",
        num_ranks=placement.num_ranks,
        ranks_per_node=placement.num_ranks,
    )
