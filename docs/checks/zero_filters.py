"""What Torch-Pruning makes of zero filters, beside asfp.compact; the figures of docs/comparison.md.

pip install torch-pruning==1.6.1
python docs/checks/zero_filters.py
"""

from __future__ import annotations

import copy

import torch
import torch_pruning
import torchvision
from torch import nn

import asfp


def main() -> None:
    torch.manual_seed(0)
    net = torchvision.models.resnet18(weights=None)
    with torch.no_grad():  # batch norms as training leaves them: no zeros and ones
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
    net.eval()
    inner = [name for name, _ in net.named_modules() if name.endswith(".conv1")]
    asfp.SoftPruner(net, 0.3, epochs=1, layers=lambda name, module: name in inner).step(1)
    images = torch.randn(4, 3, 224, 224)
    small, cut = asfp.compact(net, images[:1]), copy.deepcopy(net)
    graph = torch_pruning.DependencyGraph().build_dependency(cut, example_inputs=images[:1])
    for name in inner:
        layer = cut.get_submodule(name)
        zero = (layer.weight.flatten(1).abs().sum(1) == 0).nonzero().flatten().tolist()
        graph.get_pruning_group(layer, torch_pruning.prune_conv_out_channels, idxs=zero).prune()
    with torch.no_grad():
        want = net(images)
        print(f"range of the logits {float(want.max() - want.min()):.1f}")
        for name, model in (("torch-pruning", cut), ("asfp", small)):
            filters = model.get_submodule("layer1.0.conv1").out_channels
            print(
                f"{name}: {filters} filters in layer1.0.conv1, off by {float((model(images) - want).abs().max()):.1e}"
            )
    graph = torch_pruning.DependencyGraph().build_dependency(net, example_inputs=images[:1])
    group = graph.get_pruning_group(net.layer1[0].conv2, torch_pruning.prune_conv_out_channels, idxs=[0, 1])
    names = {id(module): name for name, module in net.named_modules()}
    coupled = {names[id(dependency.target.module)] for dependency, _ in group if id(dependency.target.module) in names}
    print(f"pruned together with layer1.0.conv2: {', '.join(sorted(coupled))}")


if __name__ == "__main__":
    main()
