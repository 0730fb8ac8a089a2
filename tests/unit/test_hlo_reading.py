"""What tests/tpu/hlo.py reads off programs that torch_xla 2.9 compiled for eight devices, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tpu.hlo import DumpFolder, Module

RESHARDED = """\
HloModule SyncTensorsGraph.16, entry_computation_layout={(f32[], f32[2,8]{1,0})->(f32[2,16]{1,0})}, num_partitions=8

%add.clone (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x.1, %y.1)
}

ENTRY %SyncTensorsGraph.16_spmd (param.1: f32[], param: f32[2,8]) -> (f32[2,16], f32[8,4], f32[2,8]) {
  %param = f32[2,8]{1,0} parameter(1), sharding={devices=[4,2]0,1,2,3,4,5,6,7}
  %all-gather = f32[2,16]{1,0} all-gather(%param), channel_id=1, replica_groups=[4,2]<=[8], dimensions={1}, \
use_global_device_ids=true
  %param.1 = f32[] parameter(0), sharding={replicated}
  %reshape.4 = f32[2,4,4]{2,1,0} reshape(%all-gather)
  %all-to-all = f32[2,4,4]{2,1,0} all-to-all(%reshape.4), channel_id=2, replica_groups={{0,2,4,6},{1,3,5,7}}
  %dot = f32[2,8]{1,0} dot(%param, %param), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-reduce = f32[2,8]{1,0} all-reduce(%dot), channel_id=4, replica_groups={}, to_apply=%add.clone
  ROOT %tuple = (f32[2,16]{1,0}, f32[2,4,4]{1,0}, f32[2,8]{1,0}) tuple(%all-gather, %all-to-all, %all-reduce)
}
"""

HALO = """\
HloModule SyncTensorsGraph.684, entry_computation_layout={(f32[4,1,4,8]{3,2,1,0})->f32[4,8,4,8]{3,2,1,0}}, \
num_partitions=8

ENTRY %SyncTensorsGraph.684_spmd (param: f32[4,1,4,8], param.2: f32[8,1,3,3]) -> f32[4,8,4,8] {
  %copy.40 = f32[4,1,4,8]{3,2,1,0} parameter(0), sharding={devices=[4,1,1,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}
  %partition-id = u32[] partition-id()
  %slice = f32[4,1,1,8]{3,2,1,0} slice(%copy.40), slice={[0:4], [0:1], [3:4], [0:8]}
  %collective-permute = f32[4,1,1,8]{3,2,1,0} collective-permute(%slice), channel_id=1, \
source_target_pairs={{0,1},{2,3},{4,5},{6,7}}
  %slice.1 = f32[4,1,1,8]{3,2,1,0} slice(%copy.40), slice={[0:4], [0:1], [0:1], [0:8]}
  %collective-permute.1 = f32[4,1,1,8]{3,2,1,0} collective-permute(%slice.1), channel_id=2, \
source_target_pairs={{1,0},{3,2},{5,4},{7,6}}
  %concatenate = f32[4,1,6,8]{3,2,1,0} concatenate(%collective-permute, %copy.40, %collective-permute.1), dimensions={2}
  %param.2 = f32[8,1,3,3]{3,2,1,0} parameter(1), sharding={replicated}
  ROOT %convolution = f32[4,8,4,8]{3,2,1,0} convolution(%concatenate, %param.2), window={size=3x3 pad=0_0x1_1}, \
dim_labels=bf01_oi01->bf01
}
"""

OUTSIDE = """\
HloModule SyncTensorsGraph.3, entry_computation_layout={(f32[])->f32[]}

ENTRY %SyncTensorsGraph.3 (param: f32[]) -> f32[] {
  %param = f32[] parameter(0)
  ROOT %negate = f32[] negate(%param)
}
"""


def with_collective(line: str) -> Module:
    """A program of eight partitions that has ``line`` in it."""
    return Module(
        "HloModule written_by_hand, num_partitions=8\n\nENTRY %main (a: f32[4], b: s32[]) -> f32[4] {\n"
        "  %a = f32[4]{0} parameter(0)\n  %b = s32[] parameter(1)\n  " + line + "\n}\n"
    )


def test_a_program_and_its_shapes_which_are_those_of_one_devices_piece() -> None:
    program = Module(RESHARDED)
    assert (program.name, program.num_partitions, Module(OUTSIDE).num_partitions) == ("SyncTensorsGraph.16", 8, 1)
    assert [str(shape) for shape in program.parameters] == ["f32[]", "f32[2,8]"]  # in the order of their numbers
    assert [str(shape) for shape in program.shapes_of("dot", "reshape")] == ["f32[2,4,4]", "f32[2,8]"]
    assert [shape.elements for shape in program.shapes_of("tuple")] == [32, 32, 16]
    assert [shape.dims for shape in Module(HALO).shapes_of("convolution")] == [(4, 8, 4, 8)]


def test_collectives_in_the_order_of_the_program() -> None:
    found = [(one.opcode, str(one.operands[0]), str(one.results[0])) for one in Module(RESHARDED).collectives()]
    assert found == [
        ("all-gather", "f32[2,8]", "f32[2,16]"),
        ("all-to-all", "f32[2,4,4]", "f32[2,4,4]"),
        ("all-reduce", "f32[2,8]", "f32[2,8]"),
    ]
    assert [one.opcode for one in Module(RESHARDED).collectives("all-reduce")] == ["all-reduce"]
    assert Module(HALO).collectives("all-gather") == ()
    there, back = Module(HALO).collectives("collective-permute")
    assert str(there) == "collective-permute of f32[4,1,1,8] in [[0, 1], [2, 3], [4, 5], [6, 7]]"
    assert back.groups == ((1, 0), (3, 2), (5, 4), (7, 6))


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("[1,8]<=[8]", (tuple(range(8)),)),
    ],
)
def test_groups_of_devices(written: str, groups: tuple[tuple[int, ...], ...]) -> None:
    module = with_collective(f"ROOT %r = f32[4]{{0}} all-reduce(%a), replica_groups={written}, to_apply=%add")
    assert module.collectives()[0].groups == groups


def test_a_collective_of_several_tensors_in_two_halves() -> None:
    module = with_collective(
        "%s = ((f32[4]{0}, s32[]), (f32[4]{0}, s32[])) all-reduce-start(f32[4]{0} %a, s32[] %b), "
        "replica_groups={{0,1}}\n"
        "  ROOT %d = (f32[4]{0}, s32[]) all-reduce-done(%s)"
    )
    (found,) = module.collectives("all-reduce")
    assert [str(shape) for shape in found.operands] == ["f32[4]", "s32[]"]


def test_what_is_not_understood_is_not_left_out() -> None:
    with pytest.raises(ValueError, match="allreduce"):
        Module(HALO).collectives("allreduce")
    for text in ("", "<html>"):
        with pytest.raises(ValueError, match="not the text of an HLO module"):
            _ = Module(text).name
    with pytest.raises(ValueError, match="not an HLO instruction"):
        _ = with_collective("%c = f32[4]{0}").instructions


def test_programs_of_a_folder(tmp_path: Path) -> None:
    """The training step is the last of the long ones, and those of an earlier test are left out."""

    def write(*texts: str) -> None:
        for number, text in enumerate(texts, start=dumps.compiled):
            module = f"module_{number:04}.SyncTensorsGraph.{number}"
            partitioned = f"{module}.0001.spmd-partitioner.after_spmd-partitioning.before_pipeline-end.txt"
            (tmp_path / partitioned).write_text(text)
            (tmp_path / f"{module}.cpu_after_optimizations.txt").write_text("not looked at")

    dumps = DumpFolder(tmp_path)
    write(OUTSIDE, HALO, RESHARDED, OUTSIDE)
    assert dumps.compiled == 4
    assert [module.number for module in dumps.modules()] == [0, 1, 2, 3]
    assert [module.number for module in dumps.training_steps()] == [1, 2]
    assert dumps.training_step().name == "SyncTensorsGraph.16"
    with pytest.raises(LookupError, match="number 4 or later"):
        dumps.training_step(after=4)
    write(HALO)
    assert dumps.training_step(after=4).number == 4
