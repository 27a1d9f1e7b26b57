import copy
import gc
import os
import subprocess
import sys
import weakref
from enum import StrEnum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from kvcache import InvalidTypeError
from kvcache.hf import cache_for
from kvcache.prefix import tensor_facts, weights
from kvcache.prefix.weights import WeightsGuard, fingerprint
from tests.hf import tiny_models


class Adapted(nn.Module):
    """A linear layer with an adapter that plain attributes switch, as peft's do."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 6)
        self.lora_A = nn.ModuleDict({"first": nn.Linear(6, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"first": nn.Linear(2, 6, bias=False)})
        self.scaling = {"first": 2.0}
        self.merged_adapters: list[str] = []
        self._active_adapter = ["first"]
        self._disable_adapters = False
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.base_layer(x)
        for name in () if self._disable_adapters else self._active_adapter:
            y = y + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return y


class Model(nn.Module):
    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            layers=3, rope={"theta": 1e4, "factors": [1, 2]}, text=SimpleNamespace(window=8), _name_or_path="here"
        )
        self.embed = nn.Embedding(50, 6)
        self.adapted = Adapted()
        self.norm = nn.BatchNorm1d(6)
        self.wide = nn.Linear(6, width)
        self.head = nn.Linear(6, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0), persistent=False)
        self.register_buffer("unused", None)
        self.register_parameter("no_bias", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.adapted(self.embed(ids)))) * self.inv_freq[0]


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().eval()


def optimiser_step(model):
    model(torch.arange(5)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def copy_in_place(model):
    with torch.no_grad():
        model.wide.weight.copy_(model.wide.weight)


def one_unsampled_element_in_place(model):
    with torch.no_grad():
        model.wide.weight[0, 1] += 1


def write_data(model):
    model.wide.weight.data.mul_(2)


def write_first_element_of_data(model):
    model.wide.weight.data[0, 0] += 1


def write_last_element_of_data(model):
    model.wide.weight.data[-1, -1] += 1


def write_data_of_a_single_element(model):
    model.norm.bias.data[3] += 1


def replace_data(model):
    model.wide.weight.data = model.wide.weight.data.clone()


def load_state_dict(model):
    model.load_state_dict(made(1).state_dict())


def load_the_same_state_dict(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def assign_state_dict(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def convert(model):
    model.to(torch.bfloat16)


def replace_module(model):
    model.wide = copy.deepcopy(model.wide)


def replace_module_around_the_same_tensors(model):
    other = nn.Linear(6, 40)
    other.weight, other.bias = model.wide.weight, model.wide.bias
    model.wide = other


def change_class(model):
    model.wide.__class__ = type("Other", (nn.Linear,), {})


def add_module(model):
    model.added = nn.Identity()


def rename_module(model):
    model._modules = {("renamed" if name == "wide" else name): child for name, child in model._modules.items()}


def reorder_modules(model):
    model._modules = dict(reversed(model._modules.items()))


def remove_module(model):
    del model.wide


def replace_parameter(model):
    model.wide.weight = nn.Parameter(model.wide.weight.detach())


def untie(model):
    model.head.weight = nn.Parameter(model.head.weight.detach())


def rescale_rope(model):
    model.inv_freq.data.div_(2)


def replace_buffer(model):
    model.inv_freq = model.inv_freq.clone()


def read_as_another_dtype(model):
    model.inv_freq = model.inv_freq.view(torch.int32)


def rename_buffer(model):
    model._buffers = {
        ("inv_frequency" if name == "inv_freq" else name): buffer for name, buffer in model._buffers.items()
    }


def fill_an_empty_buffer(model):
    model.unused = torch.zeros(1)


def fill_an_empty_parameter(model):
    model.no_bias = nn.Parameter(torch.zeros(1))


def view_it_otherwise(model):
    model.wide.weight.data = model.wide.weight.data.view(6, 40)


def train(model):
    model.train()


def hook(model):
    model.adapted.register_forward_hook(lambda module, inputs, output: output + 1)


def hook_before(model):
    model.adapted.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def disable_adapters(model):
    model.adapted._disable_adapters = True


def other_active_adapter(model):
    model.adapted._active_adapter = []


def clear_active_adapters(model):
    model.adapted._active_adapter.clear()


def rescale_adapter(model):
    model.adapted.scaling["first"] = 1.0


def merge_adapter(model):
    model.adapted.merged_adapters.append("first")


def int_in_place_of_float(model):
    model.adapted.scaling["first"] = 2


def add_text(model):
    model.adapted.mode = "fast"


def text_that_reads_as_a_container(model):
    model.adapted._active_adapter = "['first']"


def float_of_numpy(model):
    model.adapted.factor = np.float64(1.5)


def set_config_int(model):
    model.config.layers = 2


def set_config_deep(model):
    model.config.rope["factors"][1] = 3


def set_sub_config(model):
    model.config.text.window = 4


def replace_config(model):
    model.config = SimpleNamespace()


CHANGES = [
    optimiser_step, copy_in_place, one_unsampled_element_in_place, write_data, write_first_element_of_data,
    write_last_element_of_data, write_data_of_a_single_element, replace_data, load_state_dict,
    load_the_same_state_dict, assign_state_dict, convert, replace_module, replace_module_around_the_same_tensors,
    change_class, add_module, rename_module, reorder_modules, remove_module, replace_parameter, untie, rescale_rope,
    replace_buffer, rename_buffer, read_as_another_dtype, fill_an_empty_buffer, fill_an_empty_parameter,
    view_it_otherwise, train, hook, hook_before, disable_adapters, other_active_adapter, clear_active_adapters,
    rescale_adapter, merge_adapter, int_in_place_of_float, add_text, text_that_reads_as_a_container, float_of_numpy,
    set_config_int, set_config_deep, set_sub_config, replace_config,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_guard_sees(change):
    model = made()
    guard = WeightsGuard(model)
    before = guard.state()
    assert guard.state() == before
    assert len(before) == 16
    change(model)
    after = guard.state()
    assert after != before
    assert guard.state() == after


def count_up(model):
    model.adapted.calls += 1


def set_an_object(model):
    model.adapted.helper = object()


def name_its_origin(model):
    model.config._used = model.config._name_or_path = model.config.name_or_path = model.name_or_path = "there"


@pytest.mark.parametrize("act", [count_up, set_an_object, name_its_origin])
def test_what_keys_and_values_do_not_depend_on_leaves_the_state(act):
    model = made()
    guard = WeightsGuard(model)
    before = guard.state()
    act(model)
    assert guard.state() == before


def test_what_can_slip_through_is_a_write_between_the_sampled_elements():
    model = made()
    guard = WeightsGuard(model)
    before, name = guard.state(), guard.fingerprint()
    model.wide.weight.data[0, 1] += 1
    assert guard.state() == before
    assert fingerprint(model) != name


@pytest.mark.parametrize(
    ("off", "on"),
    [
        (disable_adapters, lambda model: setattr(model.adapted, "_disable_adapters", False)),
        (clear_active_adapters, lambda model: model.adapted._active_adapter.append("first")),
        (rescale_adapter, lambda model: model.adapted.scaling.update(first=2.0)),
        (train, lambda model: model.eval()),
        (lambda model: model.config.rope.pop("theta"), lambda model: model.config.rope.update(theta=1e4)),
        (set_sub_config, lambda model: setattr(model.config.text, "window", 8)),
        (
            lambda model: delattr(model.adapted, "scaling"),
            lambda model: setattr(model.adapted, "scaling", {"first": 2.0}),
        ),
    ],
    ids=["disabled", "active", "scaling", "training", "order", "config", "removed"],
)
def test_switching_back_gives_the_first_state(off, on):
    model = made()
    guard = WeightsGuard(model)
    before = guard.state()
    off(model)
    assert guard.state() != before
    on(model)
    assert guard.state() == before


def test_a_hook_that_is_gone_and_a_parameter_that_is_back_give_the_first_state():
    model = made()
    guard = WeightsGuard(model)
    before = guard.state()
    handle = model.register_forward_hook(lambda *_: None)
    first, model.wide.weight = model.wide.weight, nn.Parameter(torch.zeros(40, 6))
    assert guard.state() != before
    handle.remove()
    model.wide.weight = first
    assert guard.state() == before


def test_a_new_tensor_with_the_id_of_an_old_one_is_another(monkeypatch):
    monkeypatch.setattr(tensor_facts, "id", lambda thing: 7, raising=False)
    serials = tensor_facts._Serials()
    first, second = torch.zeros(1), torch.zeros(1)
    numbers = [serials.of(first), serials.of(second)]
    del first
    assert [*numbers, serials.of(second)] == [0, 1, 1]
    del second
    assert serials._given == {}


def test_old_weights_are_freed():
    model = made()
    guard = WeightsGuard(model)
    memory = np.ones((40, 6), dtype=np.float32)
    model.wide.weight.data = torch.from_numpy(memory)
    model.embed = nn.Embedding(50, 6)
    guard.state()
    guard.fingerprint()
    old = [weakref.ref(thing) for thing in (memory, model.inv_freq, model.head.weight)]
    del memory
    gc.collect()
    assert all(ref() is not None for ref in old)
    model.to(torch.bfloat16)  # parameters stay the objects that they are, with other memory
    del model.head
    gc.collect()
    assert all(ref() is None for ref in old)


def test_looking_changes_nothing():
    model = made()
    guard = WeightsGuard(model)
    tensors = [*model.parameters(), *model.buffers()]
    versions, values = [tensor._version for tensor in tensors], copy.deepcopy(tensors)
    random = torch.get_rng_state()
    guard.state()
    guard.fingerprint()
    assert [tensor._version for tensor in tensors] == versions
    assert all(torch.equal(now, then) for now, then in zip(tensors, values, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_the_state_is_the_same_in_every_mode():
    model = made()
    guard = WeightsGuard(model)
    states = {guard.state()}
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with mode:
            states.add(guard.state())
    states.add(WeightsGuard(model).state())
    assert len(states) == 1


def test_weights_made_in_inference_mode_are_seen_by_their_content():
    with torch.inference_mode():
        model = made()
        guard = WeightsGuard(model)
        before = guard.state()
    assert guard.state() == before
    with torch.inference_mode():
        model.wide.weight.mul_(2)
    assert guard.state() != before


def test_forwards_and_generation_leave_the_state_of_a_transformers_model():
    model = tiny_models.llama()
    guard = WeightsGuard(model)
    before = guard.state()
    prompt = torch.arange(1, 9)[None]
    model(prompt)
    model(prompt, output_attentions=False, use_cache=True)
    model.generate(prompt, max_new_tokens=4, do_sample=True)
    with torch.inference_mode():
        model(prompt)
    assert guard.state() == before
    model.config.rope_parameters["rope_theta"] *= 2
    assert guard.state() != before


def test_caches_of_this_package_leave_the_state_though_they_hook_into_the_model():
    model = tiny_models.llama()
    guard = WeightsGuard(model)
    before = guard.state()
    cache = cache_for(model)
    assert model._forward_hooks
    assert guard.state() == before
    del cache


def square():
    return torch.arange(64.0).view(8, 8)


def freed():
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


STRANGE = {
    "meta": lambda: square().to("meta"),
    "sparse": lambda: square().to_sparse(),
    "csr": lambda: square().to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(square(), 0.5, 0, torch.qint8),
    "lazy": nn.UninitializedParameter,
    "uint4": lambda: torch.empty(8, dtype=torch.uint8).view(torch.uint4),
    "nothing": lambda: torch.empty(0, 8),
    "freed": freed,
    "scalar": lambda: torch.tensor(3.0),
    "conjugate": lambda: torch.complex(square(), square()).conj(),
    "float8": lambda: square().to(torch.float8_e4m3fn),
    "expanded": lambda: square()[:1].expand(8, 8),
    "sliced": lambda: square()[:, ::2],
    "transposed": lambda: square().t(),
    "flag": lambda: square() > 3,
    "wrapped": lambda: TwoTensor(square(), square()),
}


def holding(tensor):
    model = nn.Module()
    register = model.register_parameter if isinstance(tensor, nn.Parameter) else model.register_buffer
    register("strange", tensor)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STRANGE)
def test_strange_tensors_have_a_state(kind):
    model = holding(STRANGE[kind]())
    guard = WeightsGuard(model)
    before = guard.state()
    assert guard.state() == before
    model.strange = STRANGE[kind]()
    assert guard.state() != before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["scalar", "conjugate", "float8", "expanded", "sliced", "transposed", "flag"])
def test_data_of_any_layout_and_dtype_is_sampled_and_hashed(kind):
    tensor = STRANGE[kind]()
    model = holding(tensor)
    guard = WeightsGuard(model)
    before, name = guard.state(), fingerprint(model)
    last = tensor.data[-1, -1] if tensor.dim() else tensor.data
    last.copy_(~last if last.dtype == torch.bool else torch.zeros_like(last))
    assert guard.state() != before
    assert fingerprint(model) != name


def test_a_write_into_what_a_wrapper_holds_is_seen():
    model = holding(STRANGE["wrapped"]())
    guard = WeightsGuard(model)
    before, name = guard.state(), fingerprint(model)
    model.strange.b.data[0, 0] += 1
    assert guard.state() != before
    assert fingerprint(model) != name


def test_elements_of_others_between_those_of_a_slice_do_not_count():
    numbers = torch.zeros(64, 65)
    model = holding(numbers[:, ::2])
    guard = WeightsGuard(model)
    before = guard.state()
    numbers.data[:, 1::2] = 1
    assert guard.state() == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["meta", "sparse", "csr", "quantised", "lazy", "freed"])
def test_a_tensor_without_readable_bytes_has_no_fingerprint(kind):
    model = holding(STRANGE[kind]())
    with pytest.raises(InvalidTypeError, match=r"model has strange, a torch\..* bytes cannot be read"):
        fingerprint(model)


def test_a_tensor_without_elements_has_a_fingerprint():
    assert fingerprint(holding(torch.empty(0, 8))) != fingerprint(holding(torch.empty(8, 0)))


def test_models_of_one_class_differ_by_their_weights():
    one, other = made(0), made(1)
    assert fingerprint(one) == fingerprint(made(0))
    assert fingerprint(one) != fingerprint(other)
    assert WeightsGuard(one).state() != WeightsGuard(other).state()


def test_a_copy_has_the_same_fingerprint_and_another_state():
    model = made()
    twin = copy.deepcopy(model)
    assert fingerprint(twin) == fingerprint(model)
    assert WeightsGuard(twin).state() != WeightsGuard(model).state()


FINGERPRINTED = [
    change
    for change in CHANGES
    if change
    not in (copy_in_place, replace_data, load_the_same_state_dict, assign_state_dict, replace_module, train, hook)
    and change not in (hook_before, replace_module_around_the_same_tensors, replace_parameter, untie, replace_buffer)
]


@pytest.mark.parametrize("change", [*FINGERPRINTED, count_up], ids=lambda change: change.__name__)
def test_the_fingerprint_tells_apart(change):
    model = made()
    before = fingerprint(model)
    assert len(bytes.fromhex(before)) == 32
    change(model)
    assert fingerprint(model) != before


@pytest.mark.parametrize("act", [train, hook, copy_in_place, replace_module, untie, name_its_origin])
def test_the_fingerprint_is_of_the_content(act):
    model = made()
    before = fingerprint(model)
    act(model)
    assert fingerprint(model) == before


def test_large_tensors_are_read_in_pieces(monkeypatch):
    numbers = torch.arange(120.0).view(4, 5, 6)
    model, transposed = holding(numbers), holding(numbers.transpose(0, 2).contiguous().transpose(0, 2))
    assert not transposed.strange.is_contiguous()
    whole = fingerprint(model)
    for chunk in (1, 7, 30, 64):
        monkeypatch.setattr(tensor_facts, "_CHUNK", chunk)
        assert fingerprint(model) == whole
        assert fingerprint(transposed) == whole


def test_the_fingerprint_is_computed_again_only_after_a_change(monkeypatch):
    computed = []
    monkeypatch.setattr(weights, "fingerprint", lambda model: computed.append(fingerprint(model)) or computed[-1])
    model = made()
    guard = WeightsGuard(model)
    assert guard.fingerprint() == guard.fingerprint() == fingerprint(model)
    assert len(computed) == 1
    write_data(model)
    assert guard.fingerprint() == fingerprint(model) != computed[0]
    assert len(computed) == 2


_PRINT = """
import torch
from kvcache.prefix.weights import fingerprint
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
model.names = {"a", "b", "c", "d", "e"}
model.sizes = {name: len(name) for name in model.names}
model.kind = object
model.config = type("Config", (), {})()
model.config.of = {name: [name, None, 1.5, object()] for name in model.names}
print(fingerprint(model))
"""


def test_the_fingerprint_is_the_same_in_every_process():
    names = {
        subprocess.run(
            [sys.executable, "-c", _PRINT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(names) == 1
    assert len(names.pop().strip()) == 64


def test_plain_data_may_hold_itself_and_enumerations():
    class Colour(StrEnum):
        RED = "red"
        BLUE = "blue"

    model = made()
    guard = WeightsGuard(model)
    loop: list[object] = [1]
    loop.append(loop)
    model.loop, model.colour = loop, Colour.RED
    before = guard.state()
    assert guard.state() == before
    model.colour = Colour.BLUE
    after = guard.state()
    assert after != before
    loop[0] = 2
    assert guard.state() != after


@pytest.mark.parametrize("make", [WeightsGuard, fingerprint])
def test_only_modules_have_weights(make):
    with pytest.raises(InvalidTypeError, match=r"^model is a dict; expected a torch\.nn\.Module$"):
        make({})


def test_autocast_is_another_state():
    model = nn.Linear(3, 3)
    guard = WeightsGuard(model)
    before = guard.state()
    with torch.autocast("cpu", torch.bfloat16):
        assert guard.state() != before
    assert guard.state() == before


@pytest.mark.parametrize("wrap", [torch.jit.script, lambda model: nn.Sequential(torch.jit.script(model))])
def test_scripted_modules_are_refused(wrap):
    model = wrap(nn.Linear(3, 3))
    for act in (WeightsGuard, fingerprint):
        with pytest.raises(InvalidTypeError, match="keeps its weights packed"):
            act(model)


def test_what_torch_compile_returns_has_the_fingerprint_of_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3))
    assert fingerprint(torch.compile(model)) == fingerprint(model)


def test_parameters_can_be_swapped_after_a_look():
    model = nn.Linear(3, 3)
    guard = WeightsGuard(model)
    before = guard.state()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert guard.state() != before
