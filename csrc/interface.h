// Version of what Python calls: raised with every change of a schema or of a meaning, here and in sapo_fast/native.py, so that libraries left over from an
// older build are refused instead of called.
#pragma once

#define SAPO_INTERFACE_VERSION 5
