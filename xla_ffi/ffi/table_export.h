// The tables of all calls for Python (jax_ep/_native/tables.py).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string_view>
#include <type_traits>

#include "ffi/targets.h"

namespace jax_ep::ffi_layer {

namespace nb = nanobind;

// Each size is (names of dimensions, constant): the product of those, if any, plus the constant.
inline nb::tuple ExportShape(const Shape& shape) {
  nb::list sizes;
  for (size_t i = 0; i < shape.rank; ++i) {
    const Term& term = shape.terms[i];
    nb::list factors;
    for (const Dim dim : {term.first, term.second}) {
      if (dim != Dim::kOne) factors.append(kDimNames[static_cast<size_t>(dim)]);
    }
    const int64_t constant = term.plus + (factors.size() == 0 ? 1 : 0);
    sizes.append(nb::make_tuple(nb::tuple(factors), constant));
  }
  return nb::tuple(sizes);
}

inline nb::dict ExportRow(const BufferRow& row) {
  static constexpr const char* kKinds[] = {"int32", "float32", "uint8",   "uint32", "float8_e4m3fn",
                                           "token", "output",  "payload", "scale"};
  static constexpr const char* kForms[] = {"exact", "any", "longer", "leading", "flat"};
  const auto named = [](const char* name) { return name ? nb::object(nb::str(name)) : nb::none(); };
  nb::dict made;
  made["name"] = row.name;
  made["dtype"] = kKinds[static_cast<size_t>(row.kind)];
  made["shape"] = ExportShape(row.shape);
  made["form"] = kForms[static_cast<size_t>(row.form)];
  made["given"] = named(row.given.name);
  made["omitted"] = ExportShape(row.omitted);
  made["when"] = named(row.when.name);
  made["other"] = ExportShape(row.other);
  made["other_dtype"] = kKinds[static_cast<size_t>(row.other_kind)];
  made["in_place_of"] = named(row.in_place_of);
  return made;
}

template <typename Value, typename Target>
nb::dict ExportAttribute(const AttributeRow<Value, Target>& row) {
  nb::dict made;
  made["name"] = row.name;
  made["type"] = std::is_same_v<Value, bool>      ? "bool"
                 : std::is_same_v<Value, int64_t> ? "int64"
                 : std::is_same_v<Value, float>   ? "float32"
                                                  : "string";
  made["dim"] = nb::none();
  if constexpr (std::is_same_v<Target, Dim>) {
    made["dim"] = kDimNames[static_cast<size_t>(row.target)];
  }
  return made;
}

inline nb::dict OperandTables() {
  nb::dict tables;
  const auto add = [&]<typename Call>() {
    nb::list operands, results, attributes;
    for (const BufferRow& row : kBufferRows<Call>) {
      (row.result ? results : operands).append(ExportRow(row));
    }
    std::apply([&](const auto&... rows) { (attributes.append(ExportAttribute(rows)), ...); },
               Call::kAttributes);
    nb::dict table;
    table["operands"] = operands;
    table["results"] = results;
    table["attributes"] = attributes;
    table["packed"] = Call::kPacked;
    tables[Call::kTarget] = table;
  };
  ForEachCall(StepCalls{}, add);
  ForEachCall(WindowCalls{}, add);
  ForEachCall(OnStreamCalls{}, add);
  ForEachCall(RouterCalls{}, add);
  ForEachCall(RowCalls{}, add);
  ForEachCall(MatmulCalls{}, add);
  return tables;
}

}  // namespace jax_ep::ffi_layer
