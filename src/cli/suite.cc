// Reads suites and unrolls their products into cases.
#include "cli/suite.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/json.h"

namespace fovea::cli {
namespace {

namespace fs = std::filesystem;
// Keys in the order of the file: it is the order of the cases.
Status bad(const std::string& message) { return {StatusCode::kInvalidArgument, message}; }

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// " key=value", " key" for true, nothing for false.
std::string assignment(const std::string& key, const Json& value) {
  if (value.is_boolean()) return value.get<bool>() ? " " + key : "";
  return " " + key + "=" + (value.is_string() ? value.get<std::string>() : value.dump());
}

// What one choice of a key adds to a case's text. "hq,hkv" takes a list of two.
Result<std::string> choice_text(const std::string& key, const Json& choice) {
  const std::vector<std::string> names = split(key, ',');
  if (names.size() == 1) {
    if (choice.is_structured() || choice.is_null()) {
      return bad(key + " has the value " + choice.dump() + ", must be a number, text or a boolean");
    }
    return assignment(key, choice);
  }
  if (!choice.is_array() || choice.size() != names.size()) {
    return bad(key + " has the value " + choice.dump() + ", must be a list of " +
               std::to_string(names.size()));
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) text += assignment(names[i], choice[i]);
  return text;
}

// All case texts of one entry.
Result<std::vector<std::string>> unroll(const Json& entry) {
  if (!entry.is_object()) return bad("a case is " + entry.dump() + ", must be an object");
  std::vector<std::string> texts = {""};
  for (const auto& [key, value] : entry.items()) {
    const Json choices = value.is_array() ? value : Json::array({value});
    std::vector<std::string> longer;
    for (const std::string& text : texts) {
      for (const Json& choice : choices) {
        const Result<std::string> more = choice_text(key, choice);
        if (!more.ok()) return more.status();
        longer.push_back(text + *more);
      }
    }
    texts = std::move(longer);
  }
  return texts;
}

Result<Suite> parse_suite(const Json& json) {
  if (!json.is_object() || !json.contains("cases") || !json["cases"].is_array()) {
    return bad("the file must hold an object with a list \"cases\"");
  }
  Suite suite;
  suite.name = json.value("name", "");
  suite.about = json.value("about", "");
  for (const Json& entry : json["cases"]) {
    const Result<std::vector<std::string>> texts = unroll(entry);
    if (!texts.ok()) return texts.status();
    for (const std::string& text : *texts) {
      Result<harness::AnyCase> one = harness::parse_any_case(text);
      if (!one.ok()) return bad("case \"" + text.substr(1) + "\": " + one.status().message());
      suite.cases.push_back(std::move(*one));
    }
  }
  return suite;
}

bool holds_suites(const fs::path& dir) {
  std::error_code ignored;
  for (const auto& file : fs::directory_iterator(dir, ignored)) {
    if (file.path().extension() == ".json") return true;
  }
  return false;
}

}  // namespace

Result<std::string> find_cases_dir(const std::string& given) {
  if (!given.empty()) {
    if (holds_suites(given)) return given;
    return bad("--cases-dir is " + given + ", must be a folder with .json files");
  }
  std::vector<fs::path> places;
  if (const char* variable = std::getenv("FOVEA_BENCH_DIR"); variable != nullptr) {
    places.insert(places.end(), {fs::path(variable) / "cases", fs::path(variable)});
  }
  places.insert(places.end(),
                {fs::path(FOVEA_SOURCE_DIR) / "bench/cases", fs::path("bench/cases")});
  std::string searched;
  for (const fs::path& place : places) {
    if (holds_suites(place)) return place.string();
    searched += "\n  " + place.string();
  }
  return bad("no suites found; give --cases-dir or FOVEA_BENCH_DIR. Looked in" + searched);
}

Result<std::vector<std::string>> suite_names(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& file : fs::directory_iterator(dir, error)) {
    if (file.path().extension() == ".json") names.push_back(file.path().stem().string());
  }
  if (error) return bad("cannot list " + dir + ": " + error.message());
  std::sort(names.begin(), names.end());
  return names;
}

Result<Suite> load_suite(const std::string& dir, const std::string& name) {
  const Result<std::vector<std::string>> names = suite_names(dir);
  if (!names.ok()) return names.status();
  if (std::find(names->begin(), names->end(), name) == names->end()) {
    std::string known;
    for (const std::string& n : *names) known += (known.empty() ? "" : ", ") + n;
    return bad("--suite is " + name + ", must be one of " + known);
  }
  const std::string path = (fs::path(dir) / (name + ".json")).string();
  std::ifstream file(path);
  const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return bad(path + ": is not JSON");
  Result<Suite> suite = parse_suite(json);
  if (!suite.ok()) return bad(path + ": " + suite.status().message());
  if (suite->name != name) {
    return bad(path + ": name is \"" + suite->name + "\", must equal the file's, " + name);
  }
  return suite;
}

}  // namespace fovea::cli
