// Everything of the public C++ API.
#pragma once

#include "fovea/attention.h"
#include "fovea/device.h"
#include "fovea/host_memory.h"
#include "fovea/layers.h"
#include "fovea/plan.h"
#include "fovea/status.h"
#include "fovea/tensor.h"
#include "fovea/version.h"
