"""What tests/tpu/hlo.py reads off programs that torch_xla 2.9 compiled for eight devices, shortened."""

import pytest

from tests.tpu.hlo import DumpFolder, Module, Shape

RESHARDED = """\
HloModule SyncTensorsGraph.16, entry_computation_layout={(f32[], f32[2,8]{1,0})->(f32[2,16]{1,0}, f32[8,4]{1,0}, \
f32[2,8]{1,0})}, allow_spmd_sharding_propagation_to_output={true}, num_partitions=8

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
  %broadcast.0 = f32[2,16]{1,0} broadcast(%param.1), dimensions={}
  %copy.3 = f32[2,16]{1,0} multiply(%all-gather, %broadcast.0)
  %reshape.4 = f32[2,4,4]{2,1,0} reshape(%copy.3)
  %all-to-all = f32[2,4,4]{2,1,0} all-to-all(%reshape.4), channel_id=2, \
replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={1}
  %transpose = f32[4,2,4]{2,0,1} transpose(%all-to-all), dimensions={1,0,2}
  %reshape.5 = f32[8,4]{1,0} reshape(%transpose)
  %transpose.1 = f32[8,2]{0,1} transpose(%param), dimensions={1,0}
  %all-gather.1 = f32[8,8]{0,1} all-gather(%transpose.1), channel_id=3, \
replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={1}, use_global_device_ids=true
  %dot = f32[2,8]{1,0} dot(%param, %all-gather.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-reduce = f32[2,8]{1,0} all-reduce(%dot), channel_id=4, replica_groups={{0,1},{2,3},{4,5},{6,7}}, \
use_global_device_ids=true, to_apply=%add.clone
  ROOT %tuple = (f32[2,16]{1,0}, f32[8,4]{1,0}, f32[2,8]{1,0}) tuple(%copy.3, %reshape.5, %all-reduce)
}
"""

HALO = """\
HloModule SyncTensorsGraph.684, entry_computation_layout={(f32[4,1,8,8]{3,2,1,0}, f32[8,1,3,3]{3,2,1,0})->\
f32[4,8,4,8]{3,2,1,0}}, num_partitions=8

ENTRY %SyncTensorsGraph.684_spmd (param: f32[4,1,8,8], param.2: f32[8,1,3,3]) -> f32[4,8,4,8] {
  %param = f32[4,1,8,8]{3,2,1,0} parameter(0), sharding={devices=[4,1,1,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}
  %constant.14 = s32[8]{0} constant({0, 4, 0, 4, 0, 4, 0, 4})
  %partition-id = u32[] partition-id()
  %dynamic-slice.2 = s32[1]{0} dynamic-slice(%constant.14, %partition-id), dynamic_slice_sizes={1}
  %reshape.2 = s32[] reshape(%dynamic-slice.2)
  %constant.13 = s32[] constant(0)
  %copy.40 = f32[4,1,4,8]{3,2,1,0} dynamic-slice(%param, %constant.13, %constant.13, %reshape.2, %constant.13), \
dynamic_slice_sizes={4,1,4,8}
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


def test_name_and_partitions():
    assert (Module(HALO).name, Module(HALO).num_partitions) == ("SyncTensorsGraph.684", 8)


def test_a_program_that_was_not_partitioned_runs_on_one_device():
    assert Module(OUTSIDE).num_partitions == 1


def test_parameters_are_the_entrys_in_the_order_of_their_numbers():
    assert [str(shape) for shape in Module(RESHARDED).parameters] == ["f32[]", "f32[2,8]"]


def test_activations_have_the_shapes_of_one_devices_piece():
    assert Module(HALO).shapes_of("convolution") == (Shape("f32", (4, 8, 4, 8)),)
    assert Module(RESHARDED).shapes_of("dot", "reshape") == tuple(
        Shape("f32", dims) for dims in ((2, 4, 4), (8, 4), (2, 8))
    )


def test_a_tuple_has_several_shapes():
    assert [shape.elements for shape in Module(RESHARDED).shapes_of("tuple")] == [32, 32, 16]


def test_halo_exchange_is_pairs_of_neighbours():
    there, back = Module(HALO).collectives("collective-permute")
    assert str(there) == "collective-permute of f32[4,1,1,8] in [[0, 1], [2, 3], [4, 5], [6, 7]]"
    assert back.groups == ((1, 0), (3, 2), (5, 4), (7, 6))


def test_all_collectives_in_the_order_of_the_program():
    found = [(one.opcode, str(one.operands[0]), str(one.results[0])) for one in Module(RESHARDED).collectives()]
    assert found == [
        ("all-gather", "f32[2,8]", "f32[2,16]"),
        ("all-to-all", "f32[2,4,4]", "f32[2,4,4]"),
        ("all-gather", "f32[8,2]", "f32[8,8]"),
        ("all-reduce", "f32[2,8]", "f32[2,8]"),
    ]


def test_only_some_collectives():
    assert [one.opcode for one in Module(RESHARDED).collectives("all-reduce")] == ["all-reduce"]
    assert Module(HALO).collectives("all-gather") == ()


def test_an_unknown_collective_is_refused():
    with pytest.raises(ValueError, match="allreduce"):
        Module(HALO).collectives("allreduce")


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
def test_groups_of_devices(written, groups):
    module = with_collective(f"ROOT %r = f32[4]{{0}} all-reduce(%a), replica_groups={written}, to_apply=%add")
    assert module.collectives()[0].groups == groups


def test_a_collective_of_several_tensors_in_two_halves():
    module = with_collective(
        "%s = ((f32[4]{0}, s32[]), (f32[4]{0}, s32[])) all-reduce-start(f32[4]{0} %a, s32[] %b), "
        "replica_groups={{0,1}}\n"
        "  ROOT %d = (f32[4]{0}, s32[]) all-reduce-done(%s)"
    )
    (found,) = module.collectives("all-reduce")
    assert [str(shape) for shape in found.operands] == ["f32[4]", "s32[]"]


@pytest.mark.parametrize("text", ["", "<html>"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        _ = Module(text).name


def test_a_line_that_is_not_understood_is_not_left_out():
    with pytest.raises(ValueError, match="not an HLO instruction"):
        _ = with_collective("%c = f32[4]{0}").instructions


def write(folder, number, text):
    module = f"module_{number:04}.SyncTensorsGraph.{number}"
    (folder / f"{module}.0001.spmd-partitioner.after_spmd-partitioning.before_pipeline-end.txt").write_text(text)
    (folder / f"{module}.cpu_after_optimizations.txt").write_text("not looked at")


def test_the_training_step_is_the_last_of_the_long_programs(tmp_path):
    for number, text in enumerate([OUTSIDE, HALO, RESHARDED, OUTSIDE]):
        write(tmp_path, number, text)
    dumps = DumpFolder(tmp_path)
    assert dumps.compiled == 4
    assert [module.number for module in dumps.modules()] == [0, 1, 2, 3]
    assert [module.number for module in dumps.training_steps()] == [1, 2]
    assert dumps.training_step().name == "SyncTensorsGraph.16"


def test_programs_of_an_earlier_test_are_left_out(tmp_path):
    write(tmp_path, 0, RESHARDED)
    dumps = DumpFolder(tmp_path)
    before = dumps.compiled
    with pytest.raises(LookupError, match="number 1 or later"):
        dumps.training_step(after=before)
    write(tmp_path, 1, HALO)
    assert dumps.training_step(after=before).number == 1
