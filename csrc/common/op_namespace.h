#pragma once

// The torch.ops namespace of the ops, which registry.py names NAMESPACE. A build for the kernels hub has one of its
// own, so that it loads beside an installed package.
#ifndef GRPO_NAMESPACE
#define GRPO_NAMESPACE grpo_kernels
#endif
