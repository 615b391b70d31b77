"""Published snapshots, opened as a server in Python opens them, against PyTorch and FBGEMM themselves.

A checkpoint is made with PyTorch, published and fetched by the `weighbridge` binary, opened with `safetensors`, and
run through the operators that serve such tables. Each check compares with what the same library makes of the same
tables by itself: packed rows bit for bit, and what lookups give, bit for bit.

One exception: where a row's smallest element is both +0.0 and -0.0, the sign of its bias is
whichever came first in memory for one implementation and not for the other. That one bit is masked.

    python tests/interop/check.py --binary target/release/weighbridge
    python tests/interop/check.py --binary ... --only int8    # the checks whose names begin so
    python tests/interop/check.py --binary ... --allow-missing  # skip what this environment lacks
"""

import argparse
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile

SCHEMA = 'schema = "weighbridge.policy/v1"\n'
ROWS = 300
WIDTHS = (16, 32, 64, 128)
ODD_WIDTHS = (17, 30, 61)


class Missing(Exception):
    """What this environment lacks for a check."""


def need(module):
    """Imports `module`, or tells that it is missing."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # A broken native library raises OSError, a wrong version whatever it likes.
        raise Missing(f"{module} cannot be imported: {str(error).splitlines()[0]}") from error


class Weighbridge:
    """The binary, with a store of its own."""

    def __init__(self, binary, folder):
        self.binary = pathlib.Path(binary).resolve()
        self.folder = pathlib.Path(folder)
        self.count = 0

    def run(self, *arguments):
        command = [self.binary, *arguments, "--json", "--store", self.folder / "store"]
        done = subprocess.run([str(part) for part in command], cwd=self.folder, capture_output=True, text=True)
        try:
            document = json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"{arguments}: no document: {done.stdout!r} {done.stderr!r}") from None
        return done.returncode, document

    def publish(self, checkpoint, rules):
        """Publishes `checkpoint` under `rules`: the exit code, the document, and the model's name."""
        self.count += 1
        model = f"m{self.count}"
        policy = self.folder / f"{model}.toml"
        policy.write_text(SCHEMA + rules)
        code, document = self.run("publish", checkpoint, "--model", model, "--policy", policy)
        return code, document, model

    def published(self, checkpoint, rules):
        """Publishes and fetches: tensors by name, as `safetensors` reads them, and their metadata."""
        from safetensors import safe_open

        code, document, model = self.publish(checkpoint, rules)
        assert code == 0, document
        served = self.folder / f"served-{model}"
        code, document = self.run("fetch", model, "--into", served)
        assert code == 0, document
        tensors, metadata = {}, {}
        for file in sorted((served / "current").glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                metadata.update(json.loads((opened.metadata() or {}).get("weighbridge", "{}")))
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})
        return tensors, metadata


def tables(widths, rows=ROWS):
    """Tables by name: heavy-tailed rows, and rows of the kinds at which quantizers differ."""
    import torch

    generator = torch.Generator().manual_seed(20251)
    made = {}
    for width in widths:
        table = torch.randn(rows, width, generator=generator) ** 3 * 0.1
        table[0] = 0.0
        table[1] = -0.0
        table[2] = 0.75
        table[3, 0] = 1000.0
        table[4] = torch.arange(width) / 255.0
        table[5] = torch.arange(width) % 16 - 7.5
        table[6] *= 1e-30
        table[7] = table[7].abs() + 100.0
        table[8] = table[8].abs()
        table[8, :2] = torch.tensor([0.0, -0.0])
        made[f"model.ebc.embedding_bags.t{width}.weight"] = table
    return made


def as_safetensors(folder, made):
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    return folder


def as_pt(folder, made):
    import torch

    folder.mkdir()
    # A trainer's dict: nested, with values that are no tensors.
    torch.save({**made, "step": 3, "optim": {"lr": 0.1}}, folder / "model.pt")
    return folder / "model.pt"


def as_dcp(folder, made):
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(made), checkpoint_id=str(folder), no_dist=True)
    return folder


FORMATS = {"safetensors": as_safetensors, "pt": as_pt, "dcp": as_dcp}


def without_zero_signs(packed, bias_bytes):
    """`packed` rows, trailing, with the bias's sign cleared where the bias is a zero."""
    packed = packed.clone()
    bias = packed[:, -bias_bytes:].clone()
    bias[:, -1] &= 0x7F
    packed[(bias == 0).all(dim=1), -1] &= 0x7F
    return packed


def assert_bits(ours, theirs, what):
    """That two tensors have the same bytes; a difference is told by its first row."""
    import torch

    assert ours.shape == theirs.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    ours, theirs = (it.contiguous().view(torch.uint8).reshape(len(it), -1) for it in (ours, theirs))
    rows = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
    assert not rows, f"{what}: {len(rows)} rows differ, first {rows[0]}: {ours[rows[0]]} is not {theirs[rows[0]]}"


def bags(rows):
    """Indices, offsets and weights of bags: empty, of one, of many, with repetitions."""
    import torch

    generator = torch.Generator().manual_seed(7)
    lengths = torch.cat([torch.tensor([0, 1, 9, 1, 64]), torch.ones(rows, dtype=torch.int64)])
    many = int(lengths[:5].sum())
    indices = torch.cat([torch.randint(rows, (many,), generator=generator), torch.arange(rows)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return indices, offsets, torch.rand(len(indices), generator=generator)


def look_up(operator, weight, more=None, pruned=False, mapping=None):
    """What an embedding-bag operator of `torch.ops.quantized` gives for the bags of [`bags`]."""
    indices, offsets, weights = more or bags(len(weight))
    return operator(weight, indices, offsets, False, 0, pruned, weights, mapping, True)


def operators(name):
    """Prepack and lookup of `byte`, `4bit` or `2bit`."""
    import torch

    quantized = torch.ops.quantized
    prepack = getattr(quantized, f"embedding_bag_{name}_prepack")
    return prepack, getattr(quantized, f"embedding_bag_{name}_rowwise_offsets")


def check_packed(ours, table, kind, what):
    """That `ours` is what torch packs of `table`, and that lookups give the same."""
    prepack, operator = operators(kind)
    theirs = prepack(table)
    bias_bytes = 4 if kind == "byte" else 2
    assert_bits(without_zero_signs(ours, bias_bytes), without_zero_signs(theirs, bias_bytes), what)
    # Sums are compared as numbers where only a zero's sign may differ, else as bits: -0.0 + x is x.
    assert_bits(look_up(operator, ours) + 0.0, look_up(operator, theirs) + 0.0, f"{what}, looked up")


def row_wise(encoding, kind):
    """The check of a row-wise encoding over every format of checkpoint."""

    def check(weighbridge, folder):
        made = tables(WIDTHS)
        for form, write in FORMATS.items():
            rules = f'rule = [{{ match = "**.weight", encode = "{encoding}" }}]'
            checkpoint = write(folder / form, made)
            tensors, metadata = weighbridge.published(checkpoint, rules)
            for name, table in made.items():
                check_packed(tensors[name], table, kind, f"{name} from {form}")
                assert metadata[name]["shape"] == list(table.shape), metadata[name]

    return check


def odd(encoding, kind, multiple):
    """Widths that the operators don't read: refused by default, padded where the rule says so."""

    def check(weighbridge, folder):
        import torch

        made = {name: it for name, it in tables(ODD_WIDTHS).items() if it.shape[1] % multiple}
        checkpoint = as_safetensors(folder / "odd", made)
        rules = 'rule = [{ match = "**.weight", encode = { encoding = "%s", odd_width = "%s" } }]'
        code, document, _ = weighbridge.publish(checkpoint, rules % (encoding, "refuse"))
        assert code != 0 and "odd_width" in document["error"]["message"], document
        tensors, metadata = weighbridge.published(checkpoint, rules % (encoding, "pad"))
        for name, table in made.items():
            padded = torch.nn.functional.pad(table, (0, -table.shape[1] % multiple))
            check_packed(tensors[name], padded, kind, f"{name}, padded")
            assert metadata[name]["shape"] == list(table.shape), metadata[name]

    return check


def cast(encoding, dtype):
    """A cast against `Tensor.to`."""

    def check(weighbridge, folder):
        import torch

        # Within the range of the smallest of them, and many ties.
        generator = torch.Generator().manual_seed(3)
        made = {"a": torch.randn(500, 33, generator=generator), "b": torch.arange(-2048, 2048) / 256.0}
        made["c"] = torch.randn(64, generator=generator) * 1e-5
        checkpoint = as_safetensors(folder / "casts", made)
        tensors, _ = weighbridge.published(checkpoint, f'rule = [{{ match = "**", encode = "{encoding}" }}]')
        for name, table in made.items():
            theirs = table.to(getattr(torch, dtype))
            assert tensors[name].dtype == theirs.dtype, tensors[name].dtype
            assert_bits(tensors[name], theirs, f"{name} as {dtype}")

    return check


def fbgemm():
    """FBGEMM's operators."""
    import torch

    need("fbgemm_gpu")
    return torch.ops.fbgemm


def fbgemm_rows(encoding, pack):
    """Trailing rows against one of FBGEMM's own operators."""

    def check(weighbridge, folder):
        operators = fbgemm()
        made = tables(WIDTHS)
        checkpoint = as_safetensors(folder / "tables", made)
        rules = f'rule = [{{ match = "**.weight", encode = "{encoding}" }}]'
        tensors, _ = weighbridge.published(checkpoint, rules)
        for name, table in made.items():
            theirs = pack(operators, table)
            bias_bytes = {"int8_sbf16": 2}.get(encoding)
            ours = tensors[name]
            if bias_bytes:
                ours, theirs = (without_zero_signs(it, bias_bytes) for it in (ours, theirs))
            assert_bits(ours, theirs, f"{name} as {encoding}")

    return check


def leading(encoding, bits, alignment):
    """Leading rows, as they lie in FBGEMM's table-batched inference, against its own packing and lookup."""

    def check(weighbridge, folder):
        import torch

        operators = fbgemm()
        split = need("fbgemm_gpu.split_embedding_configs")
        batched = need("fbgemm_gpu.split_table_batched_embeddings_ops_inference")
        made = tables(WIDTHS)
        checkpoint = as_safetensors(folder / "tables", made)
        table = f'{{ encoding = "{encoding}", layout = "leading", row_alignment = {alignment} }}'
        tensors, _ = weighbridge.published(checkpoint, f'rule = [{{ match = "**.weight", encode = {table} }}]')
        kind = {8: split.SparseType.INT8, 4: split.SparseType.INT4, 2: split.SparseType.INT2}[bits]
        host = batched.EmbeddingLocation.HOST
        specs = [(name, len(it), it.shape[1], kind, host) for name, it in made.items()]

        def empty():
            module = batched.IntNBitTableBatchedEmbeddingBagsCodegen(
                specs, device="cpu", row_alignment=alignment, output_dtype=split.SparseType.FP32
            )
            module.initialize_weights()
            return module

        theirs, ours = empty(), empty()
        packed = [operators.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(it, bits) for it in made.values()]
        theirs.assign_embedding_weights([(it[:, :-4].contiguous(), it[:, -4:].contiguous()) for it in packed])
        for (rows, _), name in zip(ours.split_embedding_weights(split_scale_shifts=False), made, strict=True):
            rows.copy_(tensors[name])
        parts = zip(*(it.split_embedding_weights(split_scale_shifts=False) for it in (ours, theirs)), strict=True)
        for ((mine, _), (own, _)), name in zip(parts, made, strict=True):
            # The bias stands in bytes 2 and 3.
            used = 4 + made[name].shape[1] * bits // 8
            mine, own = (torch.roll(it[:, :used], -4, 1).contiguous() for it in (mine, own))
            assert_bits(without_zero_signs(mine, 2), without_zero_signs(own, 2), f"{name}, leading")
        indices, offsets, _ = bags(ROWS)
        starts = [offsets[:-1] + len(indices) * place for place in range(len(made))]
        indices = indices.repeat(len(made)).int()
        offsets = torch.cat([*starts, torch.tensor([len(indices)])]).int()
        assert_bits(ours(indices, offsets) + 0.0, theirs(indices, offsets) + 0.0, "looked up")

    return check


def pruned(weighbridge, folder):
    """Kept rows and their remapping, as the operators' compressed lookup takes them."""
    import torch

    made = tables((16, 64))
    kept = torch.arange(ROWS)[torch.arange(ROWS) % 3 != 1]
    checkpoint = as_safetensors(folder / "pruned", {**made, "kept": kept})
    rules = 'rule = [{ match = "**.weight", encode = "int8", keep_rows = { tensor = "kept" } }]'
    tensors, _ = weighbridge.published(checkpoint, rules)
    prepack, operator = operators("byte")
    for name, table in made.items():
        mapping = tensors[f"{name}.index_remapping"]
        assert mapping.dtype == torch.int32 and len(mapping) == ROWS, mapping
        assert (mapping == -1).nonzero().flatten().tolist() == [row for row in range(ROWS) if row % 3 == 1]
        whole = prepack(table)
        assert_bits(without_zero_signs(tensors[name], 4), without_zero_signs(whole[kept], 4), name)
        # What torch gives of the whole table when the pruned rows weigh nothing.
        indices, offsets, weights = bags(ROWS)
        compressed = look_up(operator, tensors[name], (indices, offsets, weights), True, mapping)
        blank = look_up(operator, whole, (indices, offsets, weights * (indices % 3 != 1)))
        assert torch.equal(compressed, blank), f"{name}, looked up"


def pruned_fbgemm(weighbridge, folder):
    """The remapping in FBGEMM's own pruned lookup."""
    import torch

    operators = fbgemm()
    made = tables((16,))
    kept = torch.arange(0, ROWS, 2)
    checkpoint = as_safetensors(folder / "pruned", {**made, "kept": kept})
    rules = 'rule = [{ match = "**.weight", encode = "int8", keep_rows = { tensor = "kept" } }]'
    tensors, _ = weighbridge.published(checkpoint, rules)
    (name,) = made
    mapping = tensors[f"{name}.index_remapping"]
    indices = torch.arange(ROWS, dtype=torch.int32)
    offsets = torch.tensor([0, ROWS], dtype=torch.int32)
    ends = torch.tensor([0, ROWS], dtype=torch.int64)
    found = operators.pruned_array_lookup(indices, offsets, mapping, ends)
    assert found.tolist() == [-1 if row % 2 else row // 2 for row in range(ROWS)], found


CHECKS = {
    "int8": row_wise("int8", "byte"),
    "int4": row_wise("int4", "4bit"),
    "int2": row_wise("int2", "2bit"),
    "int4_odd": odd("int4", "4bit", 2),
    "int2_odd": odd("int2", "2bit", 4),
    "f16": cast("f16", "float16"),
    "bf16": cast("bf16", "bfloat16"),
    "f8_e4m3fn": cast("f8_e4m3fn", "float8_e4m3fn"),
    "f8_e5m2": cast("f8_e5m2", "float8_e5m2"),
    "keep_rows": pruned,
    "fbgemm_int8_sbf16": fbgemm_rows(
        "int8_sbf16", lambda ops, it: ops.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(it, 8)
    ),
    "fbgemm_hfp8": fbgemm_rows(
        "hfp8_e4b7_max240", lambda ops, it: ops.FloatToHFP8Quantized(it, 4, 7, 240.0)
    ),
    "fbgemm_leading_int8": leading("int8_sbf16", 8, 1),
    "fbgemm_leading_int4": leading("int4", 4, 1),
    "fbgemm_leading_int2": leading("int2", 2, 1),
    "fbgemm_leading_int4_aligned": leading("int4", 4, 16),
    "fbgemm_keep_rows": pruned_fbgemm,
}


def run_check(name, check, binary):
    """Runs one check in a folder of its own: the word for its outcome, and why."""
    with tempfile.TemporaryDirectory(prefix="weighbridge-interop-") as folder:
        try:
            need("torch")
            need("safetensors.torch")
            check(Weighbridge(binary, folder), pathlib.Path(folder))
        except Missing as missing:
            return "missing", str(missing)
        except Exception as error:  # Whatever a check runs into is its failure; the other checks go on.
            return "FAILED", f"{type(error).__name__}: {error}"
    return "ok", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the weighbridge binary")
    parser.add_argument("--only", action="append", default=[], help="run the checks whose names begin so")
    parser.add_argument("--allow-missing", action="store_true", help="skip what this environment lacks")
    arguments = parser.parse_args()
    failed = 0
    for name, check in CHECKS.items():
        if arguments.only and not any(name.startswith(only) for only in arguments.only):
            continue
        word, why = run_check(name, check, arguments.binary)
        if word == "missing" and arguments.allow_missing:
            word = "skipped"
        failed += word in ("FAILED", "missing")
        print(f"{word:8} {name}" + (f": {why}" if why else ""), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
