"""The API, asked by the standard gRPC library of Python: from a checkpoint to rows, and back to the bytes on a disk.

The code is generated from schemas/proto by grpc_tools.protoc when this runs. Where a manifest is given, it hands that over and
follows the job; then it follows the channel, reads the snapshot's manifest and all of its chunks, puts the files together,
hashes everything, reads a table out of them by itself, and compares with the rows that the server looks up.

    python tests/interop/client.py --address localhost:7461 --ca ca.pem --token-file TOKEN --model dlrm

It takes grpcio, grpcio-tools, grpcio-health-checking, grpcio-reflection and blake3 (`--examples` too: protobuf alone).
"""

import argparse
import importlib
import json
import pathlib
import re
import struct
import sys
import tempfile

import blake3
import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_tools import protoc

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PROTO = REPOSITORY / "schemas/proto"
SERVICES = ("snapshots", "publishing", "operating", "fleet")
# How long one answer may take, and a whole stream.
SHORT, LONG = 30, 120
# Rows that are looked up, of each form.
ROWS = (0, 17, 4, 17)


def generate(folder):
    """Compiles the protobuf, and gives the modules: `snapshots`, `snapshots_grpc` and so on."""
    files = [str(PROTO / f"weighbridge/v1/{name}.proto") for name in SERVICES]
    own = str(importlib.resources.files("grpc_tools") / "_proto")
    code = protoc.main(["", f"-I{PROTO}", f"-I{own}", f"--python_out={folder}", f"--grpc_python_out={folder}", *files])
    assert code == 0, f"protoc ended with {code}"
    sys.path.insert(0, str(folder))
    modules = {}
    for name in SERVICES:
        modules[name] = importlib.import_module(f"weighbridge.v1.{name}_pb2")
        modules[f"{name}_grpc"] = importlib.import_module(f"weighbridge.v1.{name}_pb2_grpc")
    return argparse.Namespace(**modules)


class Server:
    """A channel to the API, with a token in every call."""

    def __init__(self, options, token):
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if options.ca:
            credentials = grpc.ssl_channel_credentials(pathlib.Path(options.ca).read_bytes())
            self.channel = grpc.secure_channel(options.address, credentials)
        else:
            self.channel = grpc.insecure_channel(options.address)

    def stub(self, kind):
        return kind(self.channel)

    def call(self, method, request, timeout=SHORT):
        return method(request, metadata=self.metadata, timeout=timeout)


def refused(call):
    """The status of a call that has to fail."""
    try:
        call()
    except grpc.RpcError as error:
        details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        assert b"weighbridge" in details, f"{error.code()} has no details"
        return error.code()
    raise AssertionError("it was not refused")


def check_health_and_reflection(options, server):
    health = health_pb2_grpc.HealthStub(Server(options, None).channel)
    status = health.Check(health_pb2.HealthCheckRequest(), timeout=SHORT).status
    assert status == health_pb2.HealthCheckResponse.SERVING, status
    # The library knows the messages by their former package; they are the same.
    ask = server.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = ask(iter([request]), metadata=server.metadata, timeout=SHORT)
    names = {service.name for service in answer.list_services_response.service}
    assert "weighbridge.v1.Snapshots" in names, names
    return names


def check_refusals(options, api, server):
    stranger = Server(options, None)
    resolve = api.snapshots.ResolveRequest(model=options.model)
    method = api.snapshots_grpc.SnapshotsStub
    assert refused(lambda: stranger.call(stranger.stub(method).Resolve, resolve)) == grpc.StatusCode.UNAUTHENTICATED
    stub = server.stub(method)
    nothing = api.snapshots.ResolveRequest(model=options.model, at="no-such-channel")
    assert refused(lambda: server.call(stub.Resolve, nothing)) == grpc.StatusCode.NOT_FOUND
    senseless = api.snapshots.ResolveRequest(model="../etc")
    assert refused(lambda: server.call(stub.Resolve, senseless)) == grpc.StatusCode.INVALID_ARGUMENT


def submit(options, api, server):
    """Hands the manifest over, twice, and follows the job to its end."""
    stub = server.stub(api.publishing_grpc.PublishingStub)
    manifest = pathlib.Path(options.manifest).read_bytes()
    job = server.call(stub.Submit, api.publishing.SubmitRequest(manifest=manifest)).job
    assert job == json.loads(manifest)["id"], job
    assert server.call(stub.Submit, api.publishing.SubmitRequest(manifest=manifest)).job == job
    watch = api.publishing.WatchJobRequest(model=options.model, job=job)
    states = [answer.job for answer in server.call(stub.WatchJob, watch, LONG) if answer.HasField("job")]
    assert states[-1].ended and states[-1].state == "published", states
    found = server.call(stub.GetJob, api.publishing.GetJobRequest(model=options.model, job=job)).job
    assert found.snapshot == states[-1].snapshot, found
    return found.snapshot


def watch(options, api, server):
    """The channel's first entry, once it has one: then the caller ends the stream."""
    stub = server.stub(api.snapshots_grpc.SnapshotsStub)
    stream = server.call(stub.WatchChannel, api.snapshots.WatchChannelRequest(model=options.model), LONG)
    for answer in stream:
        if answer.WhichOneof("event") == "entry":
            stream.cancel()
            entry = answer.entry
            assert json.loads(entry.document)["snapshot"] == entry.snapshot, entry
            return entry
    raise AssertionError("the stream ended without an entry")


def hashed(data):
    return blake3.blake3(data).hexdigest()


def manifest_of(options, api, server, snapshot):
    stub = server.stub(api.snapshots_grpc.SnapshotsStub)
    request = api.snapshots.GetManifestRequest(model=options.model, snapshot=snapshot)
    data = b"".join(answer.data for answer in server.call(stub.GetManifest, request))
    assert hashed(data) == snapshot, "the manifest is another one"
    return json.loads(data)


def files_of(options, api, server, manifest):
    """Every file of the snapshot, put together out of chunks that were hashed."""
    stub = server.stub(api.snapshots_grpc.SnapshotsStub)
    names = [chunk["id"] for file in manifest["files"] for chunk in file["chunks"]]
    ranges = [api.snapshots.ChunkRange(chunk=name) for name in names]
    pieces = [[] for _ in ranges]
    for answer in server.call(stub.ReadChunks, api.snapshots.ReadChunksRequest(model=options.model, chunks=ranges), LONG):
        assert answer.offset == sum(map(len, pieces[answer.index])), "a piece is missing"
        pieces[answer.index].append(answer.data)
    chunks = [b"".join(parts) for parts in pieces]
    for name, chunk in zip(names, chunks, strict=True):
        assert hashed(chunk) == name, f"chunk {name} is another one"
    files, taken = {}, iter(chunks)
    for file in manifest["files"]:
        files[file["name"]] = b"".join(next(taken) for _ in file["chunks"])
        assert len(files[file["name"]]) == file["size"], file["name"]
    return files


def tensors_of(files):
    """The bytes of each tensor, by name, as a reader of safetensors finds them; with its shape."""
    tensors = {}
    for name, data in files.items():
        if name.endswith(".safetensors"):
            (length,) = struct.unpack_from("<Q", data)
            header = json.loads(data[8 : 8 + length])
            header.pop("__metadata__", None)
            for tensor, described in header.items():
                begin, end = (8 + length + offset for offset in described["data_offsets"])
                tensors[tensor] = (data[begin:end], described["shape"])
    return tensors


def decoded(row):
    """A row of int8 codes with scale and bias behind them."""
    scale, bias = struct.unpack("<2f", row[-8:])
    return [code * scale + bias for code in row[:-8]]


def check_rows(options, api, server, manifest, tensors):
    """That the server's rows are those of the files."""
    stub = server.stub(api.snapshots_grpc.SnapshotsStub)
    tables = [tensor["name"] for tensor in manifest["tensors"] if tensor.get("encoding") == "int8_sbf32"]
    assert tables, "the snapshot has no table"
    for table in tables:
        data, (_, width) = tensors[table]
        rows = [data[row * width : (row + 1) * width] for row in ROWS]
        asked = {"model": options.model, "tensor": table, "rows": ROWS}
        encoded = server.call(stub.LookUpRows, api.snapshots.LookUpRowsRequest(form="ROW_FORM_ENCODED", **asked))
        assert encoded.data == b"".join(rows), table
        floats = server.call(stub.LookUpRows, api.snapshots.LookUpRowsRequest(**asked))
        assert (floats.width, floats.encoding) == (width - 8, "int8_sbf32"), floats
        values = struct.unpack(f"<{len(floats.data) // 4}f", floats.data)
        expected = [value for row in rows for value in decoded(row)]
        for value, wanted in zip(values, expected, strict=True):
            assert abs(value - wanted) <= 1e-6 * max(1.0, abs(wanted)), f"{table}: {value} for {wanted}"
    return len(tables)


def check_examples(api, page):
    """That the calls of grpcurl in a document ask for methods that there are, in words that they know."""
    calls = re.findall(r"^call -d '(.*)' \S+ weighbridge\.v1\.(\w+)/(\w+)$", pathlib.Path(page).read_text(), re.MULTILINE)
    assert len(calls) > 3, f"{page} has {len(calls)} calls"
    for text, service, method in calls:
        descriptor = getattr(api, service.lower()).DESCRIPTOR.services_by_name[service]
        request = descriptor.methods_by_name[method].input_type
        json_format.Parse(text, getattr(api, service.lower()).__dict__[request.name]())
    return len(calls)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--ca")
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--manifest", help="a checkpoint's manifest to hand over first")
    parser.add_argument("--examples", help="a document whose calls of grpcurl are read")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        api = generate(pathlib.Path(folder))
        if options.examples:
            print(f"{check_examples(api, options.examples)} calls of {options.examples} are right")
        server = Server(options, pathlib.Path(options.token_file).read_text().strip())
        names = check_health_and_reflection(options, server)
        check_refusals(options, api, server)
        published = submit(options, api, server) if options.manifest else None
        entry = watch(options, api, server)
        assert published in (None, entry.snapshot), f"{published} was published, and {entry.snapshot} is served"
        manifest = manifest_of(options, api, server, entry.snapshot)
        files = files_of(options, api, server, manifest)
        tensors = tensors_of(files)
        assert tensors.keys() == {tensor["name"] for tensor in manifest["tensors"]}
        tables = check_rows(options, api, server, manifest, tensors)
        print(f"services: {', '.join(sorted(names))}")
        print(f"snapshot {entry.snapshot}: {len(files)} files, {len(tensors)} tensors, {tables} tables looked up")


if __name__ == "__main__":
    main()
